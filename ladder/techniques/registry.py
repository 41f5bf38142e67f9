"""All techniques. A new one is added here, in one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from ladder.candidates import Technique
from ladder.candidates.checkpointing import WayOfCheckpointing
from ladder.techniques.adam_8bit import ADAM_8BIT
from ladder.techniques.bf16_states import BF16_STATES
from ladder.techniques.bound_cores import BIND_CORES
from ladder.techniques.compiled import COMPILE, COMPILE_WHOLE
from ladder.techniques.fp8 import FP8
from ladder.techniques.hpz import HPZ
from ladder.techniques.hybrid import HYBRID
from ladder.techniques.liger import LIGER
from ladder.techniques.offloaded_activations import OFFLOADED_ACTIVATIONS
from ladder.techniques.partial_checkpointing import PARTIAL_CHECKPOINTING
from ladder.techniques.ulysses import ULYSSES

Known = TypeVar("Known", Technique, WayOfCheckpointing)


class Registry(Mapping[str, Known]):
    """Techniques or ways of checkpointing by name, in the order in which they are tried and listed."""

    def __init__(self, *known: Known) -> None:
        self._known: dict[str, Known] = {each.name: each for each in known}

    def __getitem__(self, name: str) -> Known:
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    @contextmanager
    def including(self, one_more: Known) -> Iterator[None]:
        """Add `one_more` at the end for the duration of the block."""
        before = self._known
        self._known = {**before, one_more.name: one_more}
        try:
            yield
        finally:
            self._known = before


TECHNIQUES = Registry(LIGER, COMPILE, COMPILE_WHOLE, BF16_STATES, ADAM_8BIT, FP8, ULYSSES, HPZ, HYBRID, BIND_CORES)
WAYS_OF_CHECKPOINTING = Registry(PARTIAL_CHECKPOINTING, OFFLOADED_ACTIVATIONS)


def allowable() -> list[Technique]:
    """The techniques that are tried only if `--allow` names them."""
    return [technique for technique in TECHNIQUES.values() if not technique.consent.switch]
