"""What is compiled while a training runs: each kernel once, however long the training is."""

from __future__ import annotations

import sys
from typing import Any


class Compilations:
    """Counts what Triton and torch.compile compile in this process.

    Triton is asked by its `knobs.compilation.listener`, which it has since 3.4, from the first count on after it was
    imported; what it reads from its cache on disk does not count. An earlier Triton is not heard.
    """

    def __init__(self) -> None:
        self._kernels = 0
        self._is_listening = False

    def count(self) -> int:
        """So far."""
        self._listen()
        dynamo = sys.modules.get("torch._dynamo.utils")
        frames = int(dynamo.counters["frames"]["total"]) if dynamo is not None else 0
        return self._kernels + frames

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
