"""What a training does once, however long it is: it compiles its kernels, and reserves its memory."""

from __future__ import annotations

import sys
from typing import Any

import torch


class FirstTimes:
    """Tells whether something was compiled in this process, or memory reserved, since it was asked last.

    Triton is asked by its `knobs.compilation.listener`, which it has since 3.4, once it was imported; what it reads
    from its cache on disk does not count. An earlier Triton is not heard. Memory that torch's allocator takes from the
    GPU is taken for good, unless it has also given some back: that goes on as long as the training.
    """

    def __init__(self) -> None:
        self._kernels = 0
        self._is_listening = False
        self._compiled = self._taken = self._given_back = 0
        self.any_since()

    def any_since(self) -> bool:
        """Since the last call."""
        before = self._compiled, self._taken, self._given_back
        self._compiled = self._kernels + self._frames()
        self._taken, self._given_back = _memory()
        self._listen()
        has_grown = self._taken > before[1] and self._given_back == before[2]
        return self._compiled > before[0] or has_grown

    def _frames(self) -> int:
        """Those that torch.compile has compiled."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        return int(dynamo.counters["frames"]["total"]) if dynamo is not None else 0

    def _listen(self) -> None:
        knobs = sys.modules.get("triton.knobs")
        if self._is_listening or knobs is None:
            return
        self._is_listening, before = True, knobs.compilation.listener

        def noted(*, cache_hit: bool, **told: Any) -> None:
            self._kernels += not cache_hit
            if before is not None:
                before(cache_hit=cache_hit, **told)

        knobs.compilation.listener = noted


def _memory() -> tuple[int, int]:
    """Bytes that torch's allocator has ever taken from this process's GPU, and ever given back."""
    stats = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
    return int(stats.get("reserved_bytes.all.allocated", 0)), int(stats.get("reserved_bytes.all.freed", 0))
