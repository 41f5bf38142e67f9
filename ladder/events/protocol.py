"""What controller and ranks say to each other: one trial's specification, and the events a rank appends to its file.

Both cross a process boundary, so both are checked by pydantic. Times are seconds on CLOCK_MONOTONIC, which all
processes of a host share; they order events across ranks.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from ladder.events.outcome import OutcomeKind
from ladder.workload.script import ScriptFacts, ScriptKind
from ladder.workload.workload import OptimizerName, Task

# In the order a rank goes through them. A rank's silence is judged by the deadline of the phase it is in.
Phase = Literal["process_group", "model", "engine", "warmup", "measure", "evaluation", "gather", "teardown"]

# Every process of a run carries this variable from its start, so that none can be mistaken for somebody else's.
RUN_MARKER = "LADDER_RUN_MARKER"
UNREPORTED = os.EX_IOERR
"""The exit status of a rank that could not write what became of it."""


class _Frozen(BaseModel):
    # A loss may be infinite or no number; as null it would make the whole event unreadable.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class StepPolicy(_Frozen):
    """How many optimizer steps a candidate is timed for."""

    warmup: int = 1
    """Untimed optimizer steps before timing; an engine's first candidate takes one more, where Adam's state appears."""
    minimum: int = 2
    """Steps of what does not lose, however long they take: one alone may have been disturbed."""
    maximum: int = 12
    target_spread: float = 0.01
    """Timing stops once the median is known to this fraction."""
    seconds: float = 4.0
    """After these no further step is timed: long steps vary little."""
    disagreement: float = 0.04
    """Unless there are two of them only, one longer than the other by this fraction: a third tells which is usual."""
    loser_margin: float = 0.10
    """A candidate whose fastest step, made faster by this fraction, still loses to the best so far is left early."""
    loser_seconds: float = 0.5
    """But not before it was timed for so long: short steps wait for their host, and the first ones for longest."""
    hopeless_margin: float = 0.75
    """As `loser_margin`, of an untimed step, whose first allocations are slow: what still loses is timed at once."""

    def is_enough(
        self, candidate: CandidateSpec, steps: Sequence[float], before: float, timed: float, elapsed: float
    ) -> bool:
        """Whether the candidate needs no further step after `steps`, the seconds of those timed in `timed` seconds.

        `before` is what the untimed step before them took: of long steps, one that it agrees with is enough. `elapsed`
        are the seconds since that one began.
        """
        if len(steps) >= self.maximum or (
            timed >= self.loser_seconds and candidate.loses(min(steps), self.loser_margin)
        ):
            return True
        pair = (before, *steps) if len(steps) == 1 else tuple(steps)
        if len(pair) < self.minimum:
            return False
        disagree = len(pair) == 2 and max(pair) > (1 + self.disagreement) * min(pair)
        # Of a soak's many thousand steps the spread would take longer than a step, and none is small enough.
        can_be_precise = len(steps) > 1 and self.target_spread > 0
        is_precise = can_be_precise and relative_spread(steps) / math.sqrt(len(steps)) < self.target_spread
        return is_precise or (elapsed > self.seconds and not disagree)


def relative_spread(seconds: Sequence[float]) -> float:
    """Half the interquartile range over the median; 0 of one alone."""
    if len(seconds) < 2:
        return 0.0
    first, median, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return (third - first) / 2 / median


class CandidateSpec(_Frozen):
    """A candidate as a rank sees it."""

    key: str
    checkpoint_every: int
    micro_batch: int
    accumulation: int
    offload_activations: bool = False
    beat_step_seconds: float | None = None
    """Seconds of an optimizer step at the real accumulation that would equal the best so far."""
    first_within: float | None = None
    """Left out if the trial's first candidate took more seconds than this for an optimizer step."""

    def step_seconds(self, accumulate: float | None, boundary: float) -> float:
        """Seconds of an optimizer step, of those of its micro-steps without and with the optimizer."""
        return boundary + (self.accumulation - 1) * (accumulate or 0.0)

    def loses(self, seconds: float, margin: float) -> bool:
        """Whether an optimizer step of so many seconds, made faster by `margin`, is still behind the best so far."""
        return self.beat_step_seconds is not None and seconds * (1 - margin) > self.beat_step_seconds

    def is_left_out(self, first_seconds: float) -> bool:
        """Whether the first candidate, which took so long for an optimizer step, was too slow for this one."""
        return self.first_within is not None and first_seconds > self.first_within


class ScriptSpec(_Frozen):
    """A user's script as the trial."""

    command: tuple[str, ...]
    """As it was typed."""
    scratch: str
    """The folder that takes what the script would write into its own."""
    arguments: dict[str, Any] = {}
    """TrainingArguments of the trial."""
    facts: ScriptFacts | None = None
    """None for the look, which finds them and ends."""


class TrialSpec(_Frozen):
    """One trial: one engine, its candidates in ascending predicted memory."""

    trial: str
    folder: str
    device: Literal["cuda", "cpu"]
    world_size: int
    gpu_uuids: tuple[str, ...] = ()
    """By local rank; empty on CPU."""
    model_config_json: dict[str, Any]
    task: Task
    seq_len: int
    optimizer: OptimizerName
    dtype: Literal["bf16", "fp16"]
    backend_module: str = "ladder.trial.backends.deepspeed"
    """What ranks import to train the engine."""
    deepspeed: dict[str, Any]
    """The engine's configuration; micro-batch and accumulation are those of the first candidate."""
    techniques: tuple[str, ...] = ()
    """By name."""
    rank_modules: tuple[str, ...] = ()
    """What ranks import for the techniques that need it."""
    shares_sequences: bool = False
    """All ranks work on the same sequences, each on its part of them."""
    same_data: bool = False
    """All ranks train on the same sequences, as those that share them do: to be compared with such."""
    candidates: tuple[CandidateSpec, ...]
    memory_limit: int
    """Bytes each rank may hold in all: the device's own size, or less."""
    steps: StepPolicy = StepPolicy()
    proof: bool = False
    """Also run an evaluation pass and gather the 16-bit weights."""
    probe: bool = False
    """The model has a few of its layers only: what is measured says how fast the engine is, no more."""
    parity: bool = False
    """Losses are to be compared with another engine's: weights by name, no dropout, one batch again and again."""
    save_folder: str | None = None
    """Where the proof writes the gathered weights; None keeps them in memory."""
    stop_at: float | None = None
    """No further candidate begins after this moment on CLOCK_MONOTONIC: the time budget is spent."""
    seed: int = 0
    script: ScriptSpec | None = None
    """What is trained instead of a model with random weights."""


class PhaseEvent(_Frozen):
    kind: Literal["phase"] = "phase"
    t: float
    phase: Phase
    candidate: str | None = None


class StepEvent(_Frozen):
    """A sign of progress: one micro-step is over."""

    kind: Literal["step"] = "step"
    t: float
    candidate: str
    seconds: float


class MeasuredEvent(_Frozen):
    """A candidate is measured. Step times are of the slowest rank and the same in every rank's event."""

    kind: Literal["measured"] = "measured"
    t: float
    candidate: str
    began: float
    accumulate_seconds: list[float]
    boundary_seconds: list[float]
    skipped_steps: int
    peak_allocated: int
    peak_reserved: int
    peak_device: int
    outside_torch: int
    peak_host: int
    alloc_retries: int
    losses: list[float]
    loader_seconds: float = 0.0
    """Of an optimizer step: waiting for a script's own loader."""
    padding: float = 0.0
    """Share of the tokens that were padding, of a script's own batches."""

    def steps(self, accumulation: int) -> list[float]:
        """Seconds of each timed optimizer step, had it `accumulation` micro-steps."""
        micro = self.accumulate_seconds or [0.0] * len(self.boundary_seconds)
        return [(accumulation - 1) * one + last for one, last in zip(micro, self.boundary_seconds, strict=True)]

    def step_seconds(self, accumulation: int) -> float:
        """Median seconds of an optimizer step of `accumulation` micro-steps."""
        micro = statistics.median(self.accumulate_seconds) if self.accumulate_seconds else 0.0
        return (accumulation - 1) * micro + statistics.median(self.boundary_seconds)


class LookedEvent(_Frozen):
    """What a look at a script found."""

    kind: Literal["looked"] = "looked"
    t: float
    facts: ScriptFacts


class HeldEvent(_Frozen):
    """The rank has taken hold of the script's training: from here on it measures."""

    kind: Literal["held"] = "held"
    t: float
    by: ScriptKind


class FailedEvent(_Frozen):
    """Why this rank ended. `consequence` marks the errors that a dying peer causes."""

    kind: Literal["failed"] = "failed"
    t: float
    candidate: str | None
    outcome: OutcomeKind
    moment: str
    message: str
    bytes_asked: int | None = None
    bytes_free: int | None = None
    consequence: bool = False
    traceback: str = ""


class DoneEvent(_Frozen):
    """The rank's report is complete."""

    kind: Literal["done"] = "done"
    t: float


Event = Annotated[
    PhaseEvent | StepEvent | MeasuredEvent | LookedEvent | HeldEvent | FailedEvent | DoneEvent,
    Field(discriminator="kind"),
]
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)


def parse_event(line: str | bytes) -> Event:
    """One line of a rank's file. Raises pydantic.ValidationError on a line this version does not know."""
    return _EVENT.validate_json(line)
