"""The rungs without DeepSpeed, through accelerate."""

from __future__ import annotations

from typing import Any

from ladder.candidates import Rung

NAME = "plain"


def _rung(name: str, stage: int, *where: Any) -> Rung:
    return Rung(name, stage, *where, backend=NAME, open_to=frozenset({"model", "accelerate"}))


PLAIN_RUNGS: tuple[Rung, ...] = (
    _rung("ddp", 0),
    _rung("fsdp2+no-reshard", 2),
    _rung("fsdp2", 3),
    _rung("fsdp2+cpu", 3, "cpu", "cpu"),
)
