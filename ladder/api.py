"""The Python API: the commands as functions with typed results. `import ladder` exports them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ladder.emit import load_best_config as _load
from ladder.errors import UsageError
from ladder.options.answer import VerifyOptions
from ladder.options.declaring import checked_values, declared, gathered
from ladder.options.plan import PlanOptions, ScaleOptions
from ladder.options.python_calls import in_python_words, python_words, with_options
from ladder.options.tune import TuneOptions
from ladder.results import Planned, Scaled, Tuned
from ladder.text import instead_of
from ladder.tuning.interruption import interruptible_call
from ladder.tuning.planning import as_json, plan_of
from ladder.tuning.run import run_tune
from ladder.tuning.scaling import as_json as scale_as_json
from ladder.tuning.scaling import scale_of
from ladder.tuning.stored import is_running, stored_output
from ladder.tuning.tune_events import Note, Subscriber, TuneEvent, each_of, harmless
from ladder.tuning.verification import run_verification
from ladder.tuning.verified import Verification
from ladder.watch import watching
from ladder.watch.plain import say

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ladder.options.arguments import PlanArguments, ScaleArguments, TuneArguments, VerifyArguments

T = TypeVar("T")


@with_options(TuneOptions)
def tune(
    model: str = "",
    *,
    quiet: bool = False,
    callbacks: Sequence[Subscriber] = (),
    **options: Unpack[TuneArguments],
) -> Tuned:
    """Find the fastest DeepSpeed configuration that fits, as `ladder tune` does.

    The options are those of the command, with underscores. Sizes are bytes or a text such as "40GiB", times are seconds
    or a text such as "15m".

    Raises a LadderError for everything expected. That nothing fits is a result, and an error only of `best`; but a
    model that is far from fitting by prediction is refused with a NothingFitsError before any trial.
    Ctrl-C and a notebook's stop button end it in good order, with a KeyboardInterrupt: what was measured is kept, and
    the same call continues where it stopped. Pressed again, they end it at once. Off the main thread nothing interrupts
    it.

    Each of `callbacks` is called with every event of the tune, in order, on the thread that runs the tune, which waits
    for it. The events are frozen dataclasses; do not change what they hold:

    - `ladder.Note`: a sentence for the user (`text`)
    - `ladder.SearchBegins`: what is searched (`space`, `unsupported`), and what an earlier start measured (`records`)
    - `ladder.TrialBegins`: a trial is about to start (`spec`), and why (`reason`)
    - `ladder.RankReported`: one rank of the running trial (`rank`) has reported something (`event`)
    - `ladder.TrialEnds`: a trial has ended (`run`), and its results are in the history (`records`)
    - `ladder.TuneEnds`: the files are written (`answer`, `stopped`, `interrupted`); not sent if an error is raised

    If a callback raises an exception, the tune continues: the exception is logged with its traceback by the logger
    "ladder" (on stderr, unless the program configures logging), and this callback is not called again.
    """
    with python_words(TuneOptions):
        asked = _asked(TuneOptions, "tune", {"model": model, **options})
        with interruptible_call() as cancelled, watching(quiet=quiet) as view:
            tell = _with_python_notes(TuneOptions, each_of(view, *map(harmless, callbacks)))
            return Tuned(run_tune(asked, tell, cancelled))


@with_options(PlanOptions)
def plan(model: str = "", **options: Unpack[PlanArguments]) -> Planned:
    """Predict memory by part, speed and the GPUs needed for each rung, as `ladder plan` does, without a GPU.

    The options are those of the command, with underscores. Sizes are bytes or a text such as "80GiB".
    """
    with python_words(PlanOptions):
        asked = _asked(PlanOptions, "plan", {"model": model, **options})
        return Planned(as_json(*plan_of(asked, lambda note: say(in_python_words(note, PlanOptions)))))


@with_options(ScaleOptions)
def scale(model: str = "", **options: Unpack[ScaleArguments]) -> Scaled:
    """Compare numbers of GPUs, each as `plan` predicts it, as `ladder scale` does.

    The options are those of the command, with underscores; `gpus` is a text such as "1,2,4,8". Raises NothingFitsError
    if nothing fits on any of the numbers.
    """
    with python_words(ScaleOptions):
        asked = _asked(ScaleOptions, "scale", {"model": model, **options})
        return Scaled(scale_as_json(asked, scale_of(asked, lambda note: say(in_python_words(note, ScaleOptions)))))


@with_options(VerifyOptions)
def verify(
    path: str | Path = "best_config.json", *, quiet: bool = False, **options: Unpack[VerifyArguments]
) -> Verification:
    """Run the proof of fit again, as `ladder verify` does; see `holds` and `slower` of the result.

    The options are those of the command. Ctrl-C works as for `tune`.
    """
    with python_words(VerifyOptions):
        asked = _asked(VerifyOptions, "verify", options)
        with interruptible_call() as cancelled, watching(quiet=quiet) as tell:
            return run_verification(Path(path), asked, _with_python_notes(VerifyOptions, tell), cancelled)


def load_run(path: str | Path) -> Tuned:
    """The result of a tune from its run folder, as `tune` returned it; of a running tune, what is known so far.

    Nothing is locked or changed there. UsageError if there is no run, EnvironmentFaultError if it is damaged.
    """
    folder = Path(path)
    running = is_running(folder)  # checked first, so that a tune that ends now is read completely
    return Tuned(stored_output(folder), loaded=True, running=running)


def load_best_config(path: str | Path = "best_config.json") -> dict[str, Any]:
    """The content of a best_config.json that ladder wrote and nobody changed since; UsageError otherwise."""
    return _load(Path(path))


def _asked(options: type[T], function: str, given: Mapping[str, Any]) -> T:
    """The options from keyword arguments. UsageError for unknown names and invalid values."""
    known = declared(options)
    if unknown := sorted(given.keys() - known.keys()):
        others = sorted(each.name for each in known.values() if not each.option.is_argument)
        hint = instead_of(unknown[0], others)
        raise UsageError(f"{function}() has no option {', '.join(unknown)}; {hint}")
    return gathered(options, checked_values(options, given))


def _with_python_notes(options: type, tell: Subscriber) -> Subscriber:
    """`tell`, whose notes name options as they are written in Python."""

    def told(event: TuneEvent) -> None:
        tell(replace(event, text=in_python_words(event.text, options)) if isinstance(event, Note) else event)

    return told
