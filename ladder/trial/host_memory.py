"""The most host memory that a rank held at once, while it loads weights too."""

from __future__ import annotations

import resource
import threading

_PAGE = resource.getpagesize()
_PERIOD_SECONDS = 0.05
"""Chosen: what matters here, such as a model that is loaded, stays for longer; a reading takes 50 microseconds."""


class HostMemory:
    """Samples what the process holds for itself, from `start` on.

    The kernel's own peak (VmHWM) also counts mapped files, above all those of weights, which all ranks share and the
    kernel drops when memory is short.
    """

    def __init__(self) -> None:
        self._peak = 0
        self._sampler = threading.Thread(target=self._sample, name="host memory", daemon=True)

    def start(self) -> None:
        """Forget the peak; sample from the first call on."""
        self._peak = 0
        if not self._sampler.is_alive():
            self._sampler.start()

    def _sample(self) -> None:
        tick = threading.Event()
        while not tick.wait(_PERIOD_SECONDS):
            self.note()

    def note(self) -> None:
        """What the process holds now may be the most."""
        held = _own_bytes()  # read first: `start` may forget the peak meanwhile
        self._peak = max(self._peak, held)

    def held(self) -> int:
        """Bytes that are resident now, mapped files included."""
        with open("/proc/self/statm") as sizes:
            return int(sizes.read().split()[1]) * _PAGE

    def peak(self) -> int:
        """As `held`, and what the process held more of its own before."""
        return self.held() + max(0, self._peak - _own_bytes())


def _own_bytes() -> int:
    """Resident bytes that no file stands behind, shared memory included."""
    kinds = ("RssAnon:", "RssShmem:")
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) * 1024 for line in status if line.startswith(kinds))
