"""The data exchanged between controller and ranks: a trial's specification, and the events in a rank's file.

Both cross a process boundary, so their kinds are checked when they are read. Times are seconds on CLOCK_MONOTONIC,
which is the same for all processes of a host, so events of different ranks can be ordered. A launcher on several hosts
moves them to its own.
"""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ladder.events.as_json import NotReadError, from_plain
from ladder.events.outcome import Alike, OutcomeKind
from ladder.events.protection import Level
from ladder.events.step_policy import CandidateSpec, StepPolicy
from ladder.workload.modules import Product
from ladder.workload.script import OwnTraining, ScriptFacts, ScriptKind
from ladder.workload.workload import OptimizerName, Task

# In the order in which a rank goes through them. Each phase has its own deadline.
Phase = Literal["process_group", "model", "engine", "warmup", "measure", "evaluation", "gather", "teardown"]

# Every process of a run has this environment variable from its start, so that it can be told from others.
RUN_MARKER = "LADDER_RUN_MARKER"
UNREPORTED = os.EX_IOERR
"""The exit status of a rank that could not write its report."""


@dataclass(frozen=True, kw_only=True)
class ScriptSpec:
    """A user's script as the trial."""

    command: tuple[str, ...]
    """As it was typed."""
    mode: Literal["look", "trial", "run"] = "trial"
    """A look ends where training would begin; a run is the user's own, with the settings of an answer."""
    scratch: str = ""
    """The folder that takes what a look or a trial would write into the user's."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """TrainingArguments of a trial or a run."""
    kernels: tuple[str, ...] = ()
    """Of a look: the Trainer's arguments that change its kernels."""
    resume: str = ""
    """Of a run with the Trainer: the checkpoint from which it goes on; empty for its beginning."""
    torch_limit: int = 0
    """Of a run with a `memory_limit`: bytes for torch's allocator on a GPU."""
    told: tuple[str, ...] = ()
    """Which of `micro_batch` and `accumulation` the command says in the script's own options."""
    facts: ScriptFacts | None = None
    """What the look found; for a trial."""
    planned: OwnTraining | None = None
    """What the training has to equal: the script's own, by a look; None where that is not known."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """The ranks of a trial that run on one of several nodes, and where all ranks meet."""

    first: int
    count: int
    address: str
    """Of the node of rank 0, as the other nodes reach it."""
    port: int = 0
    """Of the meeting point; 0 on the node of rank 0, which chooses it."""


@dataclass(frozen=True, kw_only=True)
class GenerationSpec:
    """Generating in place of training: how the model is loaded, and what it generates."""

    weights: str
    """The folder of the model's weights."""
    load: dict[str, Any] | None
    """The arguments of `from_pretrained`; None writes random weights into the folder, and generates nothing."""
    own_prompts: bool = False
    """Each rank has a part of a candidate's prompts; its micro-batch is those of all ranks."""
    every_batch: bool = False
    """Larger batches follow also where they no longer pay."""
    prompt_len: int = 0
    new_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class TrialSpec:
    """One trial: one engine, its candidates in ascending predicted memory."""

    trial: str
    folder: str
    device: Literal["cuda", "cpu"]
    world_size: int
    gpu_uuids: tuple[str, ...] = ()
    """By rank of this node; empty on CPU."""
    model_config_json: dict[str, Any]
    task: Task
    seq_len: int
    optimizer: OptimizerName
    optimizer_module: str = ""
    """The module that ranks import to make it; empty where a script makes its own."""
    dtype: Literal["bf16", "fp16", "fp32"]
    lora: dict[str, Any] | None = None
    """The arguments of peft's LoraConfig; None trains the model's own weights."""
    load_in: Literal["4bit", "8bit"] | None = None
    """How frozen linear layers are held if they are quantised."""
    prepare_kbit: bool = False
    """peft's prepare_model_for_kbit_training is called before there are adapters."""
    freeze: tuple[str, ...] = ()
    """Names of modules whose weights are not trained."""
    backend_module: str = ""
    """The module that ranks import to train the engine; empty for a look at a script, which trains nothing."""
    deepspeed: dict[str, Any]
    """The engine's configuration; micro-batch and accumulation are those of the first candidate."""
    techniques: tuple[str, ...] = ()
    """Their names."""
    rank_modules: tuple[str, ...] = ()
    """The modules that ranks import for techniques."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that techniques need, before anything is built."""
    shares_sequences: bool = False
    """All ranks work on the same sequences, each on a part (sequence parallelism)."""
    same_data: bool = False
    """All ranks get the same sequences, so that losses can be compared with those under sequence parallelism."""
    candidates: tuple[CandidateSpec, ...]
    memory_limit: int
    """Bytes that a rank may use: the GPU's memory, or less. 0 in a run is no limit."""
    steps: StepPolicy = field(default_factory=StepPolicy)
    proof: bool = False
    """Also run an evaluation pass and gather the 16-bit weights."""
    probe: bool = False
    """The model has only a few of its layers, to find out how fast the engine is."""
    parity: bool = False
    """Losses are compared with another engine's: weights depend on their names, there is no dropout, and the batch is
    always the same."""
    products: tuple[Product, ...] = ()
    """The model's matrix products, which the proof times alone; empty for none."""
    save_folder: str | None = None
    """Where the proof writes the gathered weights; None keeps them in memory."""
    stop_at: float | None = None
    """After this time on CLOCK_MONOTONIC no further candidate begins, and the running one is timed for one step only:
    what is left of the time budget is for the proof."""
    seed: int = 0
    script: ScriptSpec | None = None
    """What is trained instead of a model with random weights."""
    generation: GenerationSpec | None = None
    """What is done instead of training."""
    share: Share | None = None
    """The part of one node, if the trial runs on several; None is all of it."""
    may_stay: bool = False
    """Its ranks may have run another trial before, and may wait for another one after a clean end."""

    def is_late(self, now: float) -> bool:
        """Whether it is too late for more than what the trial has to do."""
        return self.stop_at is not None and now > self.stop_at

    @property
    def processes(self) -> tuple[object, ...]:
        """What its processes are started for: those of a trial that is alike in this can run it too."""
        environment = tuple(sorted(self.environment.items()))
        return self.device, self.world_size, self.gpu_uuids, self.backend_module, self.rank_modules, environment

    @property
    def local_ranks(self) -> range:
        """The ranks that run on this node."""
        return range(self.share.first, self.share.first + self.share.count) if self.share else range(self.world_size)

    @property
    def uses_deepspeed(self) -> bool:
        return "zero_optimization" in self.deepspeed

    @property
    def zero_stage(self) -> int:
        """Of the engine; 0 without DeepSpeed."""
        return int(self.deepspeed.get("zero_optimization", {}).get("stage", 0))


@dataclass(frozen=True, kw_only=True)
class PhaseEvent:
    kind: Literal["phase"] = "phase"
    t: float
    phase: Phase
    candidate: str | None = None


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """Progress: a micro-step has ended."""

    kind: Literal["step"] = "step"
    t: float
    candidate: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class MeasuredEvent(Alike):
    """A candidate is measured. Step times are of the slowest rank, so they are the same in every rank's event."""

    kind: Literal["measured"] = "measured"
    t: float
    candidate: str
    began: float
    accumulate_seconds: list[float]
    boundary_seconds: list[float]
    peak_allocated: int
    peak_reserved: int
    peak_device: int
    outside_torch: int
    peak_host: int
    held_host: int | None = None
    """Of the host when it was measured; None where that was not read."""
    alloc_retries: int
    others: float | None = None
    """Of the time of the rank's cores, what other programs took where none was idle; None where it is not known."""
    losses: list[float]
    micro_steps: int | None = None
    """Of each timed step; None where these are the whole steps of a script."""
    matrix_flops: float | None = None
    """Operations per second in the model's matrix products alone, timed after a proof; None without memory for them."""

    def steps(self, accumulation: int) -> list[float]:
        """Seconds of each timed optimizer step if it had `accumulation` micro-steps."""
        micro = self.accumulate_seconds or [0.0] * len(self.boundary_seconds)
        return [(accumulation - 1) * one + last for one, last in zip(micro, self.boundary_seconds, strict=True)]

    def step_seconds(self, accumulation: int) -> float:
        """Median seconds of an optimizer step of `accumulation` micro-steps."""
        micro = statistics.median(self.accumulate_seconds) if self.accumulate_seconds else 0.0
        return (accumulation - 1) * micro + statistics.median(self.boundary_seconds)


@dataclass(frozen=True, kw_only=True)
class GeneratedEvent:
    """A batch is generated. Seconds are of the slowest rank: until the first new token, and from there to the last."""

    kind: Literal["generated"] = "generated"
    t: float
    candidate: str
    load_seconds: float
    prompt_seconds: float
    new_seconds: float
    peak_devices: list[int]
    """By device of the rank."""
    peak_host: int
    tokens: list[list[int]]
    """The new ones of the rank's own prompts; on one rank, where all have the same."""
    model_class: str
    """Of transformers, which loads the model."""


@dataclass(frozen=True, kw_only=True)
class ProtectedEvent:
    """What keeps the user's files from the script that is about to run."""

    kind: Literal["protected"] = "protected"
    t: float
    level: Level


@dataclass(frozen=True, kw_only=True)
class LookedEvent:
    """What a look at a script found."""

    kind: Literal["looked"] = "looked"
    t: float
    facts: ScriptFacts


@dataclass(frozen=True, kw_only=True)
class HeldEvent:
    """The rank has taken hold of the script's training: from here on it measures."""

    kind: Literal["held"] = "held"
    t: float
    by: ScriptKind


@dataclass(frozen=True, kw_only=True)
class CheckpointEvent:
    """A run has written a checkpoint from which it could go on, or read one."""

    kind: Literal["checkpoint"] = "checkpoint"
    t: float
    folder: str = ""
    """Of a Trainer, which goes on where it is told; empty for a loop of the script's own, which finds its own."""


@dataclass(frozen=True, kw_only=True)
class TrainedEvent:
    """A training of a run is over, and what it made."""

    kind: Literal["trained"] = "trained"
    t: float
    optimizer_steps: int
    """Those before a checkpoint count, where the Trainer went on from one."""
    planned_steps: int | None = None
    """By the Trainer, when it began."""
    accumulation: int
    """Micro-steps of the optimizer step that had the most."""
    schedule_steps: int | None = None
    schedule_at: int | None = None
    """How far the schedule came, in its own steps."""
    is_stopped: bool = False
    """By a callback of the script's own."""


@dataclass(frozen=True, kw_only=True)
class FailedEvent:
    """Why this rank failed. `consequence` says that the failure of another rank caused it."""

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


@dataclass(frozen=True, kw_only=True)
class DoneEvent:
    """The rank's report is complete."""

    kind: Literal["done"] = "done"
    t: float


Event = (
    PhaseEvent
    | StepEvent
    | MeasuredEvent
    | GeneratedEvent
    | ProtectedEvent
    | LookedEvent
    | HeldEvent
    | CheckpointEvent
    | TrainedEvent
    | FailedEvent
    | DoneEvent
)
_BY_KIND: dict[str, type[Event]] = {each.kind: each for each in get_args(Event)}


def parse_event(line: str | bytes) -> Event:
    """Parse one line of a rank's file. NotReadError for a line that this version does not know."""
    try:
        said = json.loads(line)
        kind = _BY_KIND[said["kind"]]
    except (ValueError, TypeError, KeyError) as error:
        raise NotReadError(f"no event: {error}") from None
    return from_plain(kind, said)
