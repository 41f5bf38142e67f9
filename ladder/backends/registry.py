"""All backends, and the rungs of all. A new backend is added here, in one line.

The first one is the main one: it is searched first, and best_config.json holds its answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ladder.backends.base import Backend
from ladder.backends.deepspeed.backend import DEEPSPEED
from ladder.backends.plain.backend import PLAIN
from ladder.candidates import Engine, Rung
from ladder.registry import Registry

BACKENDS = Registry[Backend](DEEPSPEED, PLAIN)
MAIN = next(iter(BACKENDS.values()))
REFERENCE = Engine(next(rung for rung in MAIN.rungs if rung.stage == 1))
"""The engine with whose losses those of others are compared. Measured on CPU ranks in bf16: all stages agree to four
digits, after stage 0's extra step is corrected (`trial.model.forget_steps`), which is worth 1 to 3 % of the loss."""
REFERENCE_OF_TORCH = Engine(next(rung for rung in PLAIN.rungs if rung.stage == 0))
"""The same where DeepSpeed is not installed."""


class _Rungs(Mapping[str, Rung]):
    """The rungs of all backends that are registered now."""

    def __getitem__(self, name: str) -> Rung:
        for backend in BACKENDS.values():
            for rung in backend.rungs:
                if rung.name == name:
                    return rung
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (rung.name for backend in BACKENDS.values() for rung in backend.rungs)

    def __len__(self) -> int:
        return sum(len(backend.rungs) for backend in BACKENDS.values())


RUNGS_BY_NAME: Mapping[str, Rung] = _Rungs()


def backend_of(rung: Rung) -> Backend:
    """The backend that trains the engines of `rung`."""
    return BACKENDS[rung.backend]


def is_main(rung: Rung) -> bool:
    """Whether the main backend trains the engines of `rung`."""
    return backend_of(rung) is MAIN


def family_of(rung: Rung) -> str:
    """The same for rungs of a backend that differ only in knobs."""
    of_backend = "" if is_main(rung) else f"{rung.backend} "
    return f"{of_backend}{rung.stage} {rung.offload_optimizer} {rung.offload_param}"


def kin_of(rung: Rung) -> str:
    """The same for all rungs of a backend, whose work on the host is alike."""
    return rung.backend
