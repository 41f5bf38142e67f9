"""What a technique is: something an engine can have beside its rung. Each stands in a module of `ladder/techniques/`.

Everybody else asks these methods and names no technique. Each default is what a technique without a say in the matter
answers, so that a technique's own module holds only what is special about it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ladder.candidates.effects import Effects
from ladder.candidates.problem import Problem
from ladder.candidates.rungs import Rung
from ladder.workload.workload import Workload

if TYPE_CHECKING:
    from ladder.candidates.candidate import Candidate, Engine

Slot = Literal["kernels", "sequences", "numerics"]
SLOTS: tuple[Slot, ...] = ("kernels", "sequences", "numerics")
"""An engine has at most one technique of each; in this order they stand in its key."""


@dataclass(frozen=True)
class Library:
    """A package that a technique needs."""

    distribution: str
    module: str
    since: str = ""
    """The least version; empty where any will do."""


@dataclass(frozen=True)
class Consent:
    """Who decides that a technique is tried."""

    switch: str = ""
    """The option `--SWITCH/--no-SWITCH`: unless told otherwise, tried where its libraries are installed."""
    help: str = ""
    """Of that option."""
    unset: str = ""
    """What happens where the option is not given, in a few words."""
    caution: str = ""
    """Of a technique that `--allow NAME` permits: what the user should know before training with it."""

    def option(self, name: str) -> str:
        """What asks for the technique called `name`."""
        return f"--{self.switch}" if self.switch else f"--allow {name}"


@dataclass(frozen=True)
class Terms:
    """The coefficients of a candidate's memory and time that a technique can change."""

    tokens: int
    """Of a micro-step on one rank."""
    norms: float
    """Bytes that a block's norms keep of each hidden value."""
    attention: float
    """Bytes that a block's attention keeps of a token."""
    net: float
    """Bytes that a block's feed-forward net keeps of each of its values."""
    tail: float
    """Bytes that the final norm keeps of each hidden value."""
    loss: float
    """Bytes of logits and loss."""
    passing: float = 0.0
    """Bytes of a token that exist only while its block is computed again."""
    master: float = 4.0
    """Bytes of a master weight."""
    moment: float = 4.0
    """Bytes of each of Adam's two moments of a weight."""
    fp32_gradient: float = 4.0
    """Bytes of the copy of a gradient that the optimizer takes; 0 where it takes the gradient itself."""
    update_traffic: float = 60.0
    """Bytes that an optimizer step on the GPU reads and writes for each parameter: states, master, gradients in both
    widths, norm (derived)."""
    exchange: float = 0.0
    """Bytes that a rank sends in a micro-step besides gradients and parameters."""
    compute: float = 1.0
    """Seconds of computing, relative to the usual kernels."""
    doubts: tuple[tuple[str, float], ...] = ()
    """Standard deviations, as logarithms, of what the technique leaves unknown about the seconds, by name."""
    loss_doubt: tuple[str, float] = ("logits", 0.12)
    """The same of `loss`."""


@dataclass(frozen=True)
class Export:
    """What an export for one training program says about a technique."""

    changes: Mapping[str, Any]
    """Keys of the program's own file; None takes one away."""
    note: str = ""
    """A comment in the file."""


@dataclass(frozen=True)
class TrainerOnly:
    """What a Trainer script has to know where no other script could train as it was measured."""

    sentence: str
    demands: tuple[str, ...]


class Technique:
    """One technique. Instances have no state: two of one class are the same."""

    name = ""
    """In a key, behind a plus: `+name`. In best_config.json, a key with underscores."""
    title = ""
    """In a sentence."""
    slot: Slot = "kernels"
    consent = Consent()
    libraries: tuple[Library, ...] = ()
    rank_module = ""
    """Of its half in the ranks, which offers a `RankTechnique` as `TECHNIQUE`; empty where ranks need none."""
    effects = Effects()
    """What it does on a machine on paper, from other sources than `costs`: they are to disagree where one is wrong."""
    why_not = ""
    """Why it might have no effect: what it needs, for the end of a sentence."""

    changes_states = False
    """Parameters, gradients or optimizer states are kept in another way."""
    changes_blocks = False
    """A block keeps other activations."""
    changes_numerics = False
    """It trains in another way than the plain rung; losses are compared with the plain rung's under the same."""
    shares_sequences = False
    """All ranks work on the same sequences, each on its part of them."""
    breaks_as_one = False
    """What is broken on one engine is broken on all."""
    is_tried_everywhere = True
    """On each rung that it suits; otherwise `engines` says where."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @property
    def key(self) -> str:
        """In best_config.json."""
        return self.name.replace("-", "_")

    # Whether it can be tried

    def refusal(self, workload: Workload, device: str) -> str:
        """Why it can train nothing of `workload` on `device`: a sentence for who asked for it. Empty if it can."""
        return ""

    def suits(self, problem: Problem, rung: Rung) -> bool:
        """Whether engines of `rung` can have it."""
        return True

    def engines(self, problem: Problem, engines: Sequence[Engine], peak: Callable[[Candidate], int]) -> list[Engine]:
        """Of a technique that is not tried everywhere: those of `engines` that are worth trying with it, having it.

        `peak` predicts the bytes of a rank.
        """
        return []

    def advice(self, workload: Workload, *, installed: bool) -> str:
        """A sentence for who did not ask: that it is tried, or that it would be worth installing. Empty for none."""
        return ""

    # What it changes

    def configure(self, config: dict[str, Any]) -> None:
        """Change the DeepSpeed configuration."""

    def costs(self, terms: Terms, workload: Workload, candidate: Candidate, world_size: int) -> Terms:
        """The candidate's `terms` with this technique."""
        return terms

    # What training with it takes

    def environment(self, world_size: int) -> dict[str, str]:
        """Variables that the training needs."""
        return {}

    def trainer_arguments(self) -> dict[str, Any]:
        """TrainingArguments that switch it on."""
        return {}

    def optimizer(self, name: str) -> str:
        """What a script calls to make the optimizer called `name`; empty where it is the usual one."""
        return ""

    def first_call(self) -> str:
        """What a script calls on its `model` before DeepSpeed or accelerate gets it; empty for nothing."""
        return ""

    def only_the_trainer(self, world_size: int) -> TrainerOnly | None:
        """Of a technique that only the Trainer can be told of, through the environment; None where any script can."""
        return None

    def export(self, program: str) -> Export | str:
        """What an export for `program` says beside the Trainer's arguments, or why there can be none.

        The reason is a sentence without its full stop, and says which other export to take.
        """
        return Export({})
