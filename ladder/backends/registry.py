"""All backends. A new one is added here, in one line."""

from __future__ import annotations

from ladder.backends.base import Backend
from ladder.backends.deepspeed.backend import DEEPSPEED
from ladder.backends.plain.backend import PLAIN
from ladder.candidates import Rung

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (DEEPSPEED, PLAIN)}


def backend_of(rung: Rung) -> Backend:
    """The backend that trains the engines of `rung`."""
    return BACKENDS[rung.backend]
