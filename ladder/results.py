"""What the functions of the Python API return, as values that a notebook shows as tables."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladder.backends.registry import is_main
from ladder.emit import Answer, best_config, trainer_arguments
from ladder.emit.config import SECTION
from ladder.errors import UsageError
from ladder.options.python_calls import python_words
from ladder.options.tune import TuneOptions
from ladder.report.table import frame
from ladder.text import shown
from ladder.tuning.answering import TuneOutput, require_answer
from ladder.units import counted, format_bytes

if TYPE_CHECKING:
    import pandas as pd

_SHOWN_COLUMNS = [
    "rung",
    "checkpointing",
    "micro_batch",
    "outcome",
    "tokens_per_second",
    "peak_device_gib",
    "why",
]

_FRAME = "width: 100%; height: 40em; border: 1px solid #8888"


@dataclass(frozen=True)
class Tuned:
    """The result of a tune. A notebook shows it as a table, and the report with its charts."""

    output: TuneOutput
    loaded: bool = False
    """It was read from its run folder, and the tune may not have finished."""
    running: bool = False
    """The tune was still running when it was read."""

    @property
    def best(self) -> Answer:
        """The proven answer: DeepSpeed's, or with `backend="torch"` the one without.

        Raises NothingFitsError if nothing fits, which says what would fit; UsageError if nothing is proven yet because
        the tune still runs, was interrupted, or had too small a time budget.
        """
        found = self.output.result.best_so_far is not None
        answer = self.output.answer or self.output.plain
        if answer is None and (self.running or (self.loaded and found)):
            raise UsageError(f"Nothing is proven yet in {shown(self.output.run_dir)}; {self._how_to_prove()}.")
        with python_words(TuneOptions):
            require_answer(self.output.result)
        assert answer is not None  # it is made from the result's proof
        return answer

    @property
    def plain(self) -> Answer | None:
        """The proven answer without DeepSpeed, where that is faster; needs `backend="all"` or "torch"."""
        return self.output.plain

    @cached_property
    def trials(self) -> pd.DataFrame:
        """A row for each candidate; trials.csv has the same columns. What is not known is missing (NaN or None).

        The candidate:
        - rung: its name, with techniques and knobs
        - checkpointing: on, off, 1/2 (every second layer) or cpu (kept in host memory)
        - micro_batch: sequences per rank in a micro-step
        - accumulation: micro-steps per optimizer step
        - status: answer, measured, refused, predicted, pruned or unsupported
        - outcome: how its trial ended (fits, gpu_oom, …); the status if there was no trial

        Speed:
        - tokens_per_second: of all ranks together
        - proof_tokens_per_second: the same in its proof, if it had one
        - accumulate_seconds: of a micro-step without the optimizer
        - boundary_seconds: of a micro-step with the optimizer
        - step_seconds: of a whole optimizer step, with accumulation
        - spread: half the interquartile range of the steps, as a fraction of their median
        - num_steps: how many optimizer steps were timed

        Memory in GiB, of the rank that uses most:
        - peak_allocated_gib: in PyTorch's tensors
        - peak_reserved_gib: reserved by PyTorch's allocator
        - peak_device_gib: all memory of the process, according to NVML
        - host_gib: resident host memory, of all ranks together

        Power:
        - utilisation: the GPUs' mean duty cycle in the trial, 0 to 1
        - watts: mean power of all GPUs together; missing where the optimizer takes far more of a trial's short
            steps than of a training's
        - joules_per_token: watts divided by tokens_per_second

        Predictions, for candidates that were not tried:
        - predicted_tokens_per_second
        - predicted_low: it is slower than this with a probability of 10 %
        - predicted_high: it is faster than this with a probability of 10 %
        - predicted_device_gib: for a candidate that was tried, the prediction right before its trial
        - predicted_fits: the probability that it fits

        Source:
        - trial: the name of the trial that measured it
        - trial_seconds: how long that trial took, with all its candidates
        - warnings: limits of these figures
        - why: one sentence that explains its status
        """
        return frame(self.output.ledger, self.output.trial_seconds)

    @property
    def report(self) -> Path:
        """report.html of the run."""
        return self.output.run_dir / "report.html"

    def _how_to_prove(self) -> str:
        return "the tune is still running" if self.running else "start the same tune again to continue it"

    def deepspeed_config(self) -> dict[str, Any]:
        """The configuration for `deepspeed.initialize(config=…)`; UsageError for an answer without DeepSpeed."""
        if not is_main(self.best.candidate.engine.rung):
            raise UsageError(f"{self.best.candidate.key} trains without DeepSpeed; use training_arguments().")
        return {key: value for key, value in best_config(self.best).items() if key != SECTION}

    def training_arguments(self) -> dict[str, Any]:
        """Arguments to add to your own: `transformers.TrainingArguments(output_dir, **…)`."""
        arguments = trainer_arguments(self.best, Path("best_config.json"))
        return arguments | ({"deepspeed": self.deepspeed_config()} if "deepspeed" in arguments else {})

    def __repr__(self) -> str:
        answer = self.output.answer or self.output.plain
        if answer is None:
            return f"<Tuned: nothing proven to fit; {'still running' if self.running else self.output.result.stopped}>"
        memory = f"{format_bytes(answer.measurement.peak_device)} of {format_bytes(answer.memory_limit)}"
        on_paper = f", simulated on {self.output.simulated}" if self.output.simulated else ""
        return f"<Tuned: {answer.candidate.key}, {answer.tokens_per_second:,.0f} tokens/s, {memory}{on_paper}>"

    def _repr_html_(self) -> str:
        tried = self.trials[self.trials["trial"].notna()].sort_values("tokens_per_second", ascending=False)
        table = tried[_SHOWN_COLUMNS].to_html(index=False, na_rep="")
        return f"<p><b>{escape(repr(self)[1:-1])}</b></p>{table}{self._report_html()}"

    def _report_html(self) -> str:
        """The report with its charts, in a frame, so that its styles are not the notebook's."""
        try:
            page = self.report.read_text(encoding="utf-8")
        except OSError:  # not written, or moved
            return ""
        return f'<iframe srcdoc="{escape(page)}" title="{self.report.name}" style="{_FRAME}"></iframe>'


@dataclass(frozen=True)
class Planned:
    """The predictions for each rung, before anything is measured. A notebook shows them as a table."""

    facts: dict[str, Any]
    """Model, machine, workload, the seconds that a tune would take, and the rungs."""

    @cached_property
    def rungs(self) -> pd.DataFrame:
        """A row for each rung: the candidate that is predicted to be its fastest. Memory is in GiB of one GPU.

        - rung: its name
        - fits: yes, perhaps or no
        - checkpointing: on, off, 1/2 (every second layer) or cpu (kept in host memory)
        - micro_batch: sequences per rank in a micro-step
        - parameters_gib: weights, and those gathered from other ranks
        - gradients_gib: gradients
        - optimizer_gib: master weights and the optimizer's states
        - activations_gib: what the forward pass keeps for the backward pass
        - logits_gib: the model's output and its loss
        - buffers_gib: buckets, workspaces and the allocator's margin
        - outside_torch_gib: the CUDA context, NCCL and libraries
        - peak_gib: the sum of these parts
        - upper_gib: it needs more than this with a probability of only 1 %
        - host_gib: host memory of all ranks together
        - pinned_gib: the part of it that is page-locked
        - tokens_per_second: of all ranks together, a first guess
        - smallest_gpus: the fewest GPUs on which the rung fits; missing if 1,024 are too few
        """
        import pandas as pd

        return pd.DataFrame(self.facts["rungs"])

    def __repr__(self) -> str:
        facts = self.facts
        where = f"{facts['model']} on {counted(facts['gpus'], 'GPU')} of {facts['gpu_memory_gib']:g} GiB"
        winner = facts["expected_winner"]
        if winner is None:
            return f"<Planned: {where}; nothing is predicted to fit>"
        row = next(row for row in facts["rungs"] if row["rung"] == winner)
        return f"<Planned: {where}; expected winner {winner}, about {row['tokens_per_second']:,} tokens/s>"

    def _repr_html_(self) -> str:
        return str(self.rungs.to_html(index=False, na_rep=""))


@dataclass(frozen=True)
class Scaled:
    """The best configuration of each number of GPUs. A notebook shows them as a table."""

    facts: dict[str, Any]
    """Model, global batch, price and the points."""

    @cached_property
    def points(self) -> pd.DataFrame:
        """A row for each number of GPUs: its best configuration. What is not known is missing (NaN or None).

        - gpus: the number of GPUs
        - candidate: the configuration; missing if nothing is predicted to fit
        - tokens_per_second: of all GPUs together
        - low: it is slower than this with a probability of 10 %
        - high: it is faster than this with a probability of 10 %
        - device_gib: memory of the fullest GPU
        - is_sure: it fits with a probability of 99 %
        - efficiency: tokens/s per GPU, over those of the smallest number that has a speed
        - cost: of a billion tokens, with a `price`
        """
        import pandas as pd

        return pd.DataFrame(self.facts["points"])

    def __repr__(self) -> str:
        counts = ", ".join(str(point["gpus"]) for point in self.facts["points"])
        return f"<Scaled: {self.facts['model']} on {counts} GPUs>"

    def _repr_html_(self) -> str:
        return str(self.points.to_html(index=False, na_rep=""))
