"""The `ladder` command. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ladder.cli import doctor, explain, export, plan, report, tune, verify
from ladder.cli.defaults import read_defaults, schema_command
from ladder.errors import EXIT_BUG, EXIT_FOUND, LadderError

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


app.command("tune")(tune.tune)
app.command("plan")(plan.plan)
app.command("explain")(explain.explain)
app.command("report")(report.report)
app.command("verify")(verify.verify)
app.command("export")(export.export)
app.command("doctor")(doctor.doctor)
app.command("schema")(schema_command(app))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code, and prints one sentence for every expected error."""
    try:
        result = app(args=arguments, standalone_mode=False, default_map=read_defaults(app))
    except LadderError as error:
        print(f"ladder: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # click's own, however it is packaged
            sentence = error.format_message().replace(": Value error, ", ": ")  # pydantic's words, in typer's
            print(f"ladder: {sentence}", file=sys.stderr)
            return int(error.exit_code)
        if type(error).__name__ == "Abort":
            return 130
        import traceback

        traceback.print_exc()
        print("ladder: this is a bug in ladder; the lines above say where.", file=sys.stderr)
        return EXIT_BUG
    return result if isinstance(result, int) else EXIT_FOUND


if __name__ == "__main__":
    sys.exit(main())
