"""The `ladder` command. Slow imports happen only in the command that needs them."""

from __future__ import annotations

import errno
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Annotated, Any

import typer

from ladder.cli import doctor, explain, export, lists, plan, report, run, sbatch, scale, tune, verify
from ladder.cli.command_help import PanelledCommand
from ladder.cli.defaults import naming_the_file, read_defaults, schema_command
from ladder.cli.extra_copies import said_to_extra_copy
from ladder.errors import EXIT_BUG, EXIT_FOUND, EnvironmentFaultError, LadderError, UsageError

_CLOSED_PIPE = 128 + signal.SIGPIPE
_INTERRUPTED = 128 + signal.SIGINT
_UNPRINTED = (errno.ENOSPC, errno.EDQUOT, errno.EIO)

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
        from ladder.machine.versions import package_versions

        typer.echo("\n".join(f"{name} {version}" for name, version in package_versions().items()))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print versions and leave.")
    ] = False,
) -> None:
    """Options before the name of a command."""


_TUNING, _RESULTS, _LOOKING_UP = "Find a configuration", "Use the answer", "Look up"
_COMMANDS: tuple[tuple[str, str, Callable[..., int]], ...] = (
    ("tune", _TUNING, tune.tune),
    ("plan", _TUNING, plan.plan),
    ("scale", _TUNING, scale.scale),
    ("sbatch", _TUNING, sbatch.sbatch),
    ("run", _RESULTS, run.run),
    ("explain", _RESULTS, explain.explain),
    ("report", _RESULTS, report.report),
    ("verify", _RESULTS, verify.verify),
    ("export", _RESULTS, export.export),
    ("runs", _LOOKING_UP, lists.runs),
    ("models", _LOOKING_UP, lists.models),
    ("machines", _LOOKING_UP, lists.machines),
    ("doctor", _LOOKING_UP, doctor.doctor),
    ("schema", _LOOKING_UP, schema_command(app)),
)
for _name, _panel, _function in _COMMANDS:
    app.command(_name, cls=PanelledCommand, rich_help_panel=_panel)(_function)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code, and prints one sentence for every expected error.

    Without `arguments`, those of the process are used, and inherited streams and signals are repaired.
    """
    try:
        if arguments is None:
            _open_standard_streams()
            _heed_children()
        return _run(sys.argv[1:] if arguments is None else arguments)
    except (BrokenPipeError, SystemExit) as ended:  # rich and click raise SystemExit for a closed pipe
        if not isinstance(ended, BrokenPipeError) and not isinstance(ended.__context__, BrokenPipeError):
            raise
        _discard_stdout()
        return _CLOSED_PIPE
    except KeyboardInterrupt:  # before the command handles signals itself
        return _INTERRUPTED
    finally:
        if arguments is None:  # the process ends, and Python would look through all its objects for garbage once more
            gc.freeze()


_WITH_A_SCRIPT = ("tune", "plan", "sbatch", "verify", "run")
_STARTING_RANKS = ("tune", "verify", "run")


def _with_script(typed: list[str]) -> list[str]:
    """`-- train.py --lr 1` as options that any parser takes: `--script=train.py --script=--lr --script=1`."""
    if not typed or typed[0] not in _WITH_A_SCRIPT or "--" not in typed:
        return typed
    place = typed.index("--")
    return [*typed[:place], *(f"--script={word}" for word in typed[place + 1 :])]


def _run(typed: list[str]) -> int:
    defaults: dict[str, dict[str, Any]] = {}
    on_each = typed[:1] == ["run"]  # an answer for several nodes is started on each; `run` reads whether it is one
    is_asked = typed and typed[0] in _STARTING_RANKS
    extra = said_to_extra_copy(os.environ, of_each_node=on_each) if is_asked else None
    if extra is not None:
        print(f"ladder: {extra}", file=sys.stderr)
        return EXIT_FOUND  # with another code, `srun --kill-on-bad-exit` would end the copy that works
    typed = _with_script(typed)
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # characters that the locale lacks are replaced
        defaults = _defaults(typed)
        result = app(args=typed, standalone_mode=False, default_map=defaults)
        sys.stdout.flush()
    except LadderError as error:
        print(f"ladder: {naming_the_file(app, defaults, typed, str(error))}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("ladder"):
            raise
        if isinstance(error, OSError) and error.errno in _UNPRINTED and error.filename is None:
            _discard_stdout()
            print(f"ladder: stdout cannot be written ({error.strerror}); free some space there.", file=sys.stderr)
            return EnvironmentFaultError.exit_code
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # one of click's errors
            sentence = error.format_message().replace(": Value error, ", ": ")  # pydantic's prefix
            if sentence:  # empty after a bare `ladder` has printed its help
                refused = UsageError(naming_the_file(app, defaults, typed, sentence))
                _answer_in_json(refused, typed, defaults)
                print(f"ladder: {refused}", file=sys.stderr)
            return int(error.exit_code)
        if type(error).__name__ == "Abort":
            return _INTERRUPTED
        import traceback

        traceback.print_exc()
        print("ladder: this is a bug in ladder; please report it with the lines above.", file=sys.stderr)
        return EXIT_BUG
    return result if isinstance(result, int) else EXIT_FOUND


def _discard_stdout() -> None:
    """Discard what is left in stdout's buffer, as it cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _open_standard_streams() -> None:
    """Open /dev/null for streams that the shell closed (`>&-`): otherwise the next opened file would become stderr."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # all lower numbers are open, so `open` returns this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    # Python creates no objects for streams that were closed at its start.
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", errors="backslashreplace", closefd=False)


def _heed_children() -> None:
    """Reset SIGCHLD: if our parent ignored or blocked it, we would not notice when our children end."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _defaults(typed: list[str]) -> dict[str, dict[str, Any]]:
    try:
        defaults = read_defaults(app)
        if typed and typed[0] == "sbatch":  # it takes the options of `tune`, and so its defaults
            defaults["sbatch"] = {**defaults.get("tune", {}), **defaults.get("sbatch", {})}
        return {name: values for name, values in defaults.items() if values}
    except LadderError as error:
        _answer_in_json(error, typed, {})
        raise


def _answer_in_json(error: LadderError, typed: list[str], defaults: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the JSON document of `tune` or `verify` if the command is refused before it can print its own."""
    if not typed or typed[0] not in ("tune", "verify"):
        return
    asked = "--format=json" in typed or ("--format", "json") in pairwise(typed)
    is_silent = not any(word.partition("=")[0] == "--format" for word in typed)
    if asked or (is_silent and defaults.get(typed[0], {}).get("output_format") == "json"):
        from ladder.cli.tune_result import error_as_json

        typer.echo(error_as_json(error))


if __name__ == "__main__":
    sys.exit(main())
