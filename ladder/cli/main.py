"""The `ladder` command. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Annotated, Any, get_type_hints

import typer

from ladder.cli import bundled, doctor, explain, export, plan, report, tune, verify
from ladder.cli.command_help import PanelledCommand
from ladder.cli.declared import completion
from ladder.cli.defaults import naming_the_file, read_defaults, schema_command
from ladder.errors import EXIT_BUG, EXIT_FOUND, EnvironmentFaultError, LadderError, UsageError
from ladder.tuning.options import rung_names

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


def _completing(function: Callable[..., int], parameter: str, names: Callable[[], Iterable[str]]) -> Callable[..., int]:
    """`function`, whose annotated `parameter` a shell completes with `names`."""
    hint = get_type_hints(function, include_extras=True)[parameter]
    for note in hint.__metadata__:
        note.autocompletion = completion(names)
    function.__annotations__[parameter] = hint
    return function


_TUNING, _RESULTS, _LOOKING_UP = "Find a configuration", "Use the answer", "Look up"
_COMMANDS: tuple[tuple[str, str, Callable[..., int]], ...] = (
    ("tune", _TUNING, tune.tune),
    ("plan", _TUNING, plan.plan),
    ("explain", _RESULTS, _completing(explain.explain, "why", rung_names)),
    ("report", _RESULTS, report.report),
    ("verify", _RESULTS, verify.verify),
    ("export", _RESULTS, export.export),
    ("models", _LOOKING_UP, bundled.models),
    ("machines", _LOOKING_UP, bundled.machines),
    ("doctor", _LOOKING_UP, doctor.doctor),
    ("schema", _LOOKING_UP, schema_command(app)),
)
for _name, _panel, _function in _COMMANDS:
    app.command(_name, cls=PanelledCommand, rich_help_panel=_panel)(_function)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code, and prints one sentence for every expected error.

    Without `arguments` it is the process's own command, and puts in order what that process has inherited.
    """
    try:
        if arguments is None:
            _open_standard_streams()
            _heed_children()
        return _run(sys.argv[1:] if arguments is None else arguments)
    except (BrokenPipeError, SystemExit) as ended:  # rich and click answer a closed pipe with the second
        if not isinstance(ended, BrokenPipeError) and not isinstance(ended.__context__, BrokenPipeError):
            raise
        _discard_stdout()
        return _CLOSED_PIPE
    except KeyboardInterrupt:  # before the command heeds signals in its own way
        return _INTERRUPTED


_WITH_A_SCRIPT = ("tune", "plan", "verify", "run")


def _with_script(typed: list[str]) -> list[str]:
    """`-- train.py --lr 1` as options that any parser takes: `--script=train.py --script=--lr --script=1`."""
    if not typed or typed[0] not in _WITH_A_SCRIPT or "--" not in typed:
        return typed
    place = typed.index("--")
    return [*typed[:place], *(f"--script={word}" for word in typed[place + 1 :])]


def _run(typed: list[str]) -> int:
    defaults: dict[str, dict[str, Any]] = {}
    typed = _with_script(typed)
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a locale that lacks a character prints another for it
        defaults = _defaults(typed)
        result = app(args=typed, standalone_mode=False, default_map=defaults)
        sys.stdout.flush()
    except LadderError as error:
        print(f"ladder: {naming_the_file(app, defaults, typed, str(error))}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _UNPRINTED and error.filename is None:
            _discard_stdout()
            print(f"ladder: stdout cannot be written ({error.strerror}); free some space there.", file=sys.stderr)
            return EnvironmentFaultError.exit_code
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # click's own, however it is packaged
            sentence = error.format_message().replace(": Value error, ", ": ")  # pydantic's words, in typer's
            if sentence:  # none where a bare `ladder` has printed its help
                refused = UsageError(naming_the_file(app, defaults, typed, sentence))
                _answer_in_json(refused, typed, defaults)
                print(f"ladder: {refused}", file=sys.stderr)
            return int(error.exit_code)
        if type(error).__name__ == "Abort":
            return _INTERRUPTED
        import traceback

        traceback.print_exc()
        print("ladder: this is a bug in ladder; the lines above say where.", file=sys.stderr)
        return EXIT_BUG
    return result if isinstance(result, int) else EXIT_FOUND


def _discard_stdout() -> None:
    """What is left in its buffer has no reader, or no place to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _open_standard_streams() -> None:
    """What the shell has closed (`>&-`) leads to /dev/null: else the next file that is opened would be our stderr."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # all below it are open, so that this is the number which `open` takes
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    # Python has no objects for those that it found closed.
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", errors="backslashreplace", closefd=False)


def _heed_children() -> None:
    """A parent that ignored or blocked SIGCHLD has passed that on, and the end of no child of ours could be seen."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _defaults(typed: list[str]) -> dict[str, dict[str, Any]]:
    try:
        return read_defaults(app)
    except LadderError as error:
        _answer_in_json(error, typed, {})
        raise


def _answer_in_json(error: LadderError, typed: list[str], defaults: Mapping[str, Mapping[str, Any]]) -> None:
    """The document of a command that promises one, where it is refused before it begins and cannot print its own."""
    if not typed or typed[0] not in ("tune", "verify"):
        return
    asked = "--format=json" in typed or ("--format", "json") in pairwise(typed)
    is_silent = not any(word.partition("=")[0] == "--format" for word in typed)
    if asked or (is_silent and defaults.get(typed[0], {}).get("output_format") == "json"):
        from ladder.cli.tune_result import error_as_json

        typer.echo(error_as_json(error))


if __name__ == "__main__":
    sys.exit(main())
