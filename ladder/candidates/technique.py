"""The base class of techniques, which an engine can have besides its rung. Each has a module in `ladder/techniques/`.

All other code calls these methods and names no technique. The defaults change nothing, so a technique's module contains
only what is special about it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ladder.candidates.effects import Effects
from ladder.candidates.problem import Problem
from ladder.candidates.rungs import Rung, Through
from ladder.workload.workload import CountedBlock, ModelShape, Workload

if TYPE_CHECKING:
    from ladder.candidates.candidate import Candidate, Engine

Slot = Literal["kernels", "compiler", "sequences", "numerics", "nodes", "gradients", "host"]
SLOTS: tuple[Slot, ...] = ("kernels", "compiler", "sequences", "numerics", "nodes", "gradients", "host")
"""An engine has at most one technique per slot; its key lists them in this order."""


@dataclass(frozen=True)
class Library:
    """A package that a technique needs."""

    distribution: str
    module: str
    since: str = ""
    """The oldest version that works; empty for any."""


@dataclass(frozen=True)
class Consent:
    """Whether a technique is tried by default or only if the user allows it."""

    switch: str = ""
    """The name of its option `--SWITCH/--no-SWITCH`; by default it is tried if its libraries are installed."""
    help: str = ""
    """The help of that option."""
    unset: str = ""
    """What happens if the option is not given, in a few words."""
    caution: str = ""
    """For a technique that needs `--allow NAME`: what the user should know before training with it."""

    def option(self, name: str) -> str:
        """The option that asks for the technique called `name`."""
        return f"--{self.switch}" if self.switch else f"--allow {name}"


@dataclass(frozen=True)
class Export:
    """What an export for one training program contains for a technique."""

    changes: Mapping[str, Any]
    """Keys of the program's own file; a key with the value None is removed."""
    note: str = ""
    """A comment for the file."""


@dataclass(frozen=True)
class TrainerOnly:
    """A note for an answer that only a Trainer script can train as it was measured."""

    sentence: str
    demands: tuple[str, ...]


class Technique:
    """One technique. Instances have no state but `ranks`, so two of one class are usually equal."""

    name = ""
    """In a key: `+name`. In best_config.json, with underscores."""
    ranks = 0
    """How many ranks form a group, for a technique that needs groups: in a key `+name=ranks`."""
    title = ""
    """Its name in a sentence."""
    slot: Slot = "kernels"
    consent = Consent()
    libraries: tuple[Library, ...] = ()
    rank_module = ""
    """The module with its part for the ranks, a `RankTechnique` named `TECHNIQUE`; empty if ranks need none."""
    effects = Effects()
    """What it changes in a step's memory and time."""
    time_doubt = 0.0
    """The standard deviation, as a logarithm, of an unknown that it adds to the seconds of a step; 0 for none."""
    loss_doubt: tuple[str, float] | None = None
    """The unknown of the bytes of its own loss and its standard deviation as a logarithm; None if it has none."""
    why_not = ""
    """What it needs in order to have an effect, for the end of an error message."""

    through: Through = "configuration"
    """What it gets into an engine through: only rungs that are open to that can have it."""
    changes_states = False
    """It changes how parameters, gradients or optimizer states are stored."""
    changes_blocks = False
    """It changes which activations a block saves."""
    replaces_kernels = False
    """Its kernels take the places of a block's own, if they know the model: its `RankTechnique` stands in for them."""
    changes_numerics = False
    """It changes the numerics of training. Losses are then compared with the reference engine's that has it too."""
    loss_tolerance = 0.0
    """How far its losses may be from the reference engine's, as a fraction of the first, if more than others' may. They
    are then compared until the reference engine's have halved."""
    needs_bf16 = False
    """It is for training in bf16 only."""
    leaves_work_out = False
    """A step with it is the same with less work, so none without it is faster."""
    binds_cores = False
    """Each rank runs on cores of its own, to which the launch script has to bind it: see `cores_of_ranks`."""
    shares_sequences = False
    """All ranks work on the same sequences, each on a part (sequence parallelism)."""
    loads_on_all_ranks = False
    """It changes the weights before FSDP2 divides them, so that one rank cannot send them to the others."""
    breaks_as_one = False
    """If it fails with one engine, it fails with all."""
    first_differs = False
    """The first micro-step of an optimizer step takes another time than the following ones. `RankTechnique` says so
    too."""
    only_accumulates = False
    """Without accumulation an engine with it is the same as without."""
    is_tried_everywhere = True
    """It is tried on every rung that it suits; otherwise `engines` decides."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @property
    def key(self) -> str:
        """Its key in best_config.json."""
        return self.name.replace("-", "_")

    @property
    def label(self) -> str:
        """Its name in the key of an engine."""
        return f"{self.name}={self.ranks}" if self.ranks else self.name

    def on(self, problem: Problem) -> Technique:
        """The technique as the engines of `problem` have it."""
        return self

    def in_groups_of(self, ranks: int) -> Technique:
        """The technique that a key names with this number of ranks, 0 for none. KeyError if it cannot have them."""
        if ranks:
            raise KeyError(self.name)
        return self

    # Whether it can be tried

    def refusal(self, workload: Workload, device: str) -> str:
        """Why it cannot be used for `workload` on `device`: a sentence for a user who asked for it. Empty if it can."""
        if self.needs_bf16 and workload.dtype != "bf16":
            return f"--allow {self.name} needs --dtype bf16, but training is in {workload.dtype}; change one of them."
        return ""

    def suits(self, problem: Problem, rung: Rung) -> bool:
        """Whether engines of `rung` can have it, of those that are open to it."""
        return True

    def gets_into(self, rung: Rung, problem: Problem) -> bool:
        """Whether engines of `rung` can have it."""
        is_able = problem.workload.dtype == "bf16" or not self.needs_bf16
        return is_able and self.through in rung.open_to and self.suits(problem, rung)

    def engines(self, problem: Problem, engines: Sequence[Engine], peak: Callable[[Candidate], int]) -> list[Engine]:
        """If it is not tried everywhere: those of `engines` that are worth trying with it, with the technique added.

        `peak` predicts the bytes of a rank.
        """
        return []

    def advice(self, problem: Problem, *, installed: bool) -> str:
        """A sentence for a user who did not ask for it: that it is tried, or is worth installing. Empty for none."""
        return ""

    # What it changes

    def configure(self, config: dict[str, Any]) -> None:
        """Change the DeepSpeed configuration."""

    def block_of(self, model: ModelShape) -> CountedBlock | None:
        """What a block of `model` does with this technique; None if it does the same as without."""
        return model.blocks_with.get(self.name)

    def effects_beside(self, techniques: Sequence[Technique]) -> Effects:
        """Its effects in an engine that has all of `techniques`."""
        return self.effects

    # What training with it needs

    def environment(self, world_size: int) -> dict[str, str]:
        """Environment variables that the training needs."""
        return {}

    def accelerate_config(self, world_size: int) -> dict[str, Any]:
        """Keys of accelerate's file that switch it on."""
        return {}

    def trainer_arguments(self) -> dict[str, Any]:
        """TrainingArguments that switch it on."""
        return {}

    def optimizer(self, name: str) -> str:
        """The call with which a script creates the optimizer called `name`; empty if it is the usual one."""
        return ""

    def cores_of_ranks(self, cores: Sequence[int], ranks: int) -> list[list[int]]:
        """The cores of each of a node's `ranks`, of all its `cores` by place; empty for a technique that binds none."""
        return []

    def first_call(self) -> str:
        """The call that a script makes on its `model` before passing it to DeepSpeed or accelerate; empty for none."""
        return ""

    def only_the_trainer(self, world_size: int) -> TrainerOnly | None:
        """A note if only a Trainer script can use it, through the environment; None if any script can."""
        return None

    def export(self, program: str) -> Export | str:
        """What an export for `program` contains besides the Trainer's arguments, or why it is impossible.

        The reason is a sentence without its full stop that names another export to use.
        """
        return Export({})
