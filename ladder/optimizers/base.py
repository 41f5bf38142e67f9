"""What an optimizer says of itself. Everybody else asks, and compares no names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WrongAtStage:
    """Versions of DeepSpeed that train wrongly with an optimizer at one of ZeRO's stages."""

    versions: str
    """As PEP 440 specifies them."""
    stage: int
    why: str
    """The end of a sentence, with the source."""


class Optimizer(ABC):
    """One optimizer. `rank_module` names the module that makes it in a rank."""

    name: str
    """As `--optimizer` has it."""
    rank_module: str

    # What it keeps

    moments: int
    """Tensors of states, each of the shape of its weight."""

    def state_bytes(self, width: float) -> float:
        """Bytes of its states for a weight that it has in `width` bytes."""
        return self.moments * width

    # Where it trains

    wrong_at: tuple[WrongAtStage, ...] = ()
    host_operator = ""
    """DeepSpeed's operator that steps with the states on the host, by our name; empty if torch's own steps there."""
    device_operator = ""
    """The operator that DeepSpeed's own version on the GPU needs; empty without one."""

    def obstacle(self, stage: int, *, offloaded: bool) -> str:
        """Why it would make other steps under DeepSpeed at `stage`, or with its states `offloaded`; empty if not."""
        return ""

    # Its words

    in_torch: str
    """The call with which a script makes it, as trials do. With `fused` where torch has that: without it, a step makes
    copies of up to twice the bytes that it updates."""
    on_host = ""
    """The call with which a script makes it for DeepSpeed's offload; empty if that is `in_torch`."""
    in_8_bits = ""
    """The class in bitsandbytes.optim that keeps its states in 8 bits; empty without one."""
    trainer_names: tuple[str, ...] = ()
    """What the Trainer's `optim` calls it, in a script's own arguments; a file of an answer may then name it anew."""
    offloaded_names: tuple[str, ...] = ()
    """What the Trainer calls it or its class, in lower case, where it stays what it is with its states on the host."""

    @abstractmethod
    def trainer_arguments(self) -> dict[str, Any]:
        """The Trainer's arguments that choose it."""

    def deepspeed_settings(self) -> dict[str, Any]:
        """What DeepSpeed's configuration needs so that it trains with this optimizer and puts no other in its place."""
        return {}

    @abstractmethod
    def deepspeed_section(self, learning_rate: float, *, offloaded: bool) -> dict[str, Any]:
        """`optimizer` of DeepSpeed's configuration, for a script that has none of its own: that of the trials.

        All but the rate are the Trainer's defaults, because the Trainer refuses a configuration that differs from its
        arguments.
        """

    # How its losses are compared

    clipping_of_comparison: float | None = None
    """The largest gradient norm in trials that compare losses; None for that of the training."""
