"""The Python API: what the commands do, as functions with typed results; `import ladder` shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ladder.emit import Answer, best_config, trainer_arguments
from ladder.emit import load_best_config as _load
from ladder.emit.config import SECTION
from ladder.errors import UsageError
from ladder.report.table import frame
from ladder.tuning.answering import require_answer
from ladder.tuning.declaring import checked_values, declared, gathered
from ladder.tuning.interruption import interruptible_call
from ladder.tuning.options import PlanOptions, TrackerName, TuneOptions, VerifyOptions
from ladder.tuning.planning import as_json, plan_of
from ladder.tuning.run import TuneOutput, run_tune
from ladder.tuning.trackers import tracking
from ladder.tuning.tune_events import Subscriber, each_of, harmless
from ladder.tuning.verification import Verification, run_verification
from ladder.tuning.watch import watching
from ladder.tuning.watch.plain import say
from ladder.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")
_SHOWN_COLUMNS = [
    "rung",
    "checkpointing",
    "micro_batch",
    "outcome",
    "tokens_per_second",
    "peak_device_gib",
    "why",
]


@dataclass(frozen=True)
class Tuned:
    """A tune that is over. In a notebook it shows itself."""

    output: TuneOutput

    @property
    def best(self) -> Answer:
        """The proven answer. NothingFitsError says what would fit, UsageError that the time budget was too small."""
        require_answer(self.output.result)
        assert self.output.answer is not None  # it is made of the result's
        return self.output.answer

    @cached_property
    def trials(self) -> pd.DataFrame:
        """Every candidate, a row each: GiB, seconds, tokens/s, outcome and why; the columns of trials.csv."""
        return frame(self.output.ledger, self.output.trial_seconds)

    @property
    def report(self) -> Path:
        """report.html of the run."""
        return self.output.run_dir / "report.html"

    def deepspeed_config(self) -> dict[str, Any]:
        """What `deepspeed.initialize(config=…)` takes."""
        return {key: value for key, value in best_config(self.best).items() if key != SECTION}

    def training_arguments(self) -> dict[str, Any]:
        """What `transformers.TrainingArguments` takes beside your own: `TrainingArguments(output_dir, **…)`."""
        return trainer_arguments(self.best, self.output.files[0]) | {"deepspeed": self.deepspeed_config()}

    def __repr__(self) -> str:
        answer = self.output.answer
        if answer is None:
            return f"<Tuned: nothing proven to fit; {self.output.result.stopped}>"
        memory = f"{format_bytes(answer.measurement.peak_device)} of {format_bytes(answer.memory_limit)}"
        on_paper = f", simulated on {self.output.simulated}" if self.output.simulated else ""
        return f"<Tuned: {answer.candidate.key}, {answer.tokens_per_second:,.0f} tokens/s, {memory}{on_paper}>"

    def _repr_html_(self) -> str:
        tried = self.trials[self.trials["trial"].notna()].sort_values("tokens_per_second", ascending=False)
        return f"<p><b>{escape(repr(self)[1:-1])}</b></p>{tried[_SHOWN_COLUMNS].to_html(index=False, na_rep='')}"


@dataclass(frozen=True)
class Planned:
    """What is to be expected, before anything is measured. In a notebook it shows itself."""

    facts: dict[str, Any]
    """Model, machine, workload, seconds that a tune would take, and the rungs."""

    @cached_property
    def rungs(self) -> pd.DataFrame:
        """A row a rung: whether it fits, memory by part in GiB, tokens/s, the fewest GPUs it needs."""
        import pandas as pd

        return pd.DataFrame(self.facts["rungs"])

    def _repr_html_(self) -> str:
        return str(self.rungs.to_html(index=False, na_rep=""))


def tune(
    model: str,
    *,
    quiet: bool = False,
    log_to: TrackerName | None = None,
    callbacks: Sequence[Subscriber] = (),
    **options: Any,
) -> Tuned:
    """Find the fastest DeepSpeed configuration that fits, as `ladder tune` does.

    `options` are those of the command with underscores: gpus, seq_len, global_batch_size, gpu_memory ("40GiB" or
    bytes), rungs, micro_batches, time_budget (seconds), run_dir, output, … `log_to` names a tracker for the figures.
    Raises a LadderError for everything expected; that nothing fits is a result, and an error only of `best`.
    Ctrl-C and a notebook's stop button end it in good order, with a KeyboardInterrupt: what was measured is kept, and
    the same call goes on where it was. Pressed again, they end it at once. Off the main thread nothing interrupts it.

    Each of `callbacks` is called with every event of the tune, in the order in which things happen, on the thread that
    runs the tune, which waits for it. The events are frozen dataclasses; what they hold is to be read, not changed:

    - `ladder.Note`: a sentence for the person who waits (`text`)
    - `ladder.SearchBegins`: what is searched (`space`, `unsupported`), and what an earlier start measured (`records`)
    - `ladder.TrialBegins`: a trial is about to start (`spec`), and why (`reason`)
    - `ladder.RankReported`: one rank of the running trial (`rank`) has reported something (`event`)
    - `ladder.TrialEnds`: a trial is over (`run`); what it says of its candidates is kept by now (`records`)
    - `ladder.TuneEnds`: the files are written (`answer`, `stopped`, `interrupted`); not sent where an error is raised

    A callback that raises an exception does not end the tune: the exception is logged with its traceback by the logger
    "ladder" (on stderr, unless the program configures logging), and this callback is called no more.
    """
    asked = _asked(TuneOptions, "tune", {"model": model, **options})
    with interruptible_call() as cancelled, tracking(log_to, asked) as tracked, watching(quiet=quiet) as shown:
        tell = each_of(tracked.beside(shown), *map(harmless, callbacks))
        return Tuned(run_tune(asked, tell, cancelled))


def plan(model: str, **options: Any) -> Planned:
    """Predict memory by part, speed and the GPUs needed for each rung, as `ladder plan` does, without a GPU.

    `options`: gpus, gpu_memory ("80GiB" or bytes), machine, host_memory, seq_len, global_batch_size, dtype, optimizer,
    task.
    """
    return Planned(as_json(*plan_of(_asked(PlanOptions, "plan", {"model": model, **options}), say)))


def verify(path: str | Path = "best_config.json", *, quiet: bool = False, **options: Any) -> Verification:
    """Run the proof of fit again, as `ladder verify` does; `holds` and `slower` say how it went.

    `options`: steps, minutes, tolerance. Ctrl-C ends it as it ends `tune`.
    """
    asked = _asked(VerifyOptions, "verify", options)
    with interruptible_call() as cancelled, watching(quiet=quiet) as tell:
        return run_verification(Path(path), asked, tell, cancelled)


def load_best_config(path: str | Path = "best_config.json") -> dict[str, Any]:
    """The content of a best_config.json that ladder wrote and nobody changed since; UsageError otherwise."""
    return _load(Path(path))


def _asked(options: type[T], function: str, given: Mapping[str, Any]) -> T:
    """What was given by name, as the command's options. UsageError for what is unknown or cannot be."""
    known = declared(options)
    if unknown := sorted(given.keys() - known.keys()):
        others = sorted(each.name for each in known.values() if not each.option.is_argument)
        raise UsageError(f"{function}() has no option {', '.join(unknown)}; there are {', '.join(others)}.")
    return gathered(options, checked_values(options, given))
