"""All techniques. A new one is added here, in one line."""

from __future__ import annotations

from ladder.candidates import Technique
from ladder.candidates.checkpointing import WayOfCheckpointing
from ladder.registry import Registry
from ladder.techniques.adam_8bit import ADAM_8BIT
from ladder.techniques.bf16_states import BF16_STATES
from ladder.techniques.bound_cores import BIND_CORES
from ladder.techniques.compiled import COMPILE, COMPILE_WHOLE
from ladder.techniques.divided_gradients import DIVIDED_GRADIENTS
from ladder.techniques.fp8 import FP8
from ladder.techniques.hpz import HPZ
from ladder.techniques.hybrid import HYBRID
from ladder.techniques.liger import LIGER
from ladder.techniques.offloaded_activations import OFFLOADED_ACTIVATIONS
from ladder.techniques.partial_checkpointing import PARTIAL_CHECKPOINTING
from ladder.techniques.ulysses import ULYSSES
from ladder.techniques.unchecked_gradients import UNCHECKED_GRADIENTS

TECHNIQUES = Registry[Technique](
    LIGER,
    COMPILE,
    COMPILE_WHOLE,
    BF16_STATES,
    ADAM_8BIT,
    FP8,
    ULYSSES,
    HPZ,
    HYBRID,
    DIVIDED_GRADIENTS,
    UNCHECKED_GRADIENTS,
    BIND_CORES,
)
WAYS_OF_CHECKPOINTING = Registry[WayOfCheckpointing](PARTIAL_CHECKPOINTING, OFFLOADED_ACTIVATIONS)


def allowable() -> list[Technique]:
    """The techniques that are tried only if `--allow` names them."""
    return [technique for technique in TECHNIQUES.values() if not technique.consent.switch]
