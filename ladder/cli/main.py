"""The `ladder` command. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Annotated, Any

import typer

from ladder.cli import doctor, explain, export, plan, report, tune, verify
from ladder.cli.defaults import naming_the_file, read_defaults, schema_command
from ladder.cli.literal import LiteralCommand
from ladder.errors import EXIT_BUG, EXIT_FOUND, LadderError, UsageError

app = typer.Typer(
    name="ladder",
    help="Finds, by short real trials, the fastest DeepSpeed configuration that fits your model on your GPUs.",
    epilog="The first thing to try, without a GPU: ladder tune tiny-llama",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from ladder.tuning.run import package_versions

        typer.echo("\n".join(f"{name} {version}" for name, version in package_versions().items()))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print versions and leave.")
    ] = False,
) -> None:
    """Options that stand before any command."""


app.command("tune", cls=LiteralCommand)(tune.tune)
app.command("plan", cls=LiteralCommand)(plan.plan)
app.command("explain", cls=LiteralCommand)(explain.explain)
app.command("report", cls=LiteralCommand)(report.report)
app.command("verify", cls=LiteralCommand)(verify.verify)
app.command("export", cls=LiteralCommand)(export.export)
app.command("doctor", cls=LiteralCommand)(doctor.doctor)
app.command("schema", cls=LiteralCommand)(schema_command(app))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code, and prints one sentence for every expected error."""
    typed = sys.argv[1:] if arguments is None else arguments
    defaults: dict[str, dict[str, Any]] = {}
    try:
        defaults = _defaults(typed)
        result = app(args=typed, standalone_mode=False, default_map=defaults)
    except LadderError as error:
        print(f"ladder: {naming_the_file(app, defaults, typed, str(error))}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # click's own, however it is packaged
            sentence = error.format_message().replace(": Value error, ", ": ")  # pydantic's words, in typer's
            if sentence:  # none where a bare `ladder` has printed its help
                refused = UsageError(naming_the_file(app, defaults, typed, sentence))
                _answer_in_json(refused, typed)
                print(f"ladder: {refused}", file=sys.stderr)
            return int(error.exit_code)
        if type(error).__name__ == "Abort":
            return 130
        import traceback

        traceback.print_exc()
        print("ladder: this is a bug in ladder; the lines above say where.", file=sys.stderr)
        return EXIT_BUG
    return result if isinstance(result, int) else EXIT_FOUND


def _defaults(typed: list[str]) -> dict[str, dict[str, Any]]:
    try:
        return read_defaults(app)
    except LadderError as error:
        _answer_in_json(error, typed)
        raise


def _answer_in_json(error: LadderError, typed: list[str]) -> None:
    """The document of a command that promises one, where it is refused before it begins and cannot print its own."""
    asked = "--format=json" in typed or ("--format", "json") in pairwise(typed)
    if asked and typed[0] in ("tune", "verify"):
        from ladder.cli.tune_result import error_as_json

        typer.echo(error_as_json(error))


if __name__ == "__main__":
    sys.exit(main())
