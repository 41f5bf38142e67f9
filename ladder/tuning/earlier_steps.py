"""The steps of a workload that earlier tunes measured on this machine, whatever their global batch, limit and folder.

A micro-step does not depend on how many of them make an optimizer step. So a tune of the same model with another batch,
or in another folder, need not measure again which engines are slow, once a trial has shown that the machine is as fast
as it was (`search.earlier`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ladder.events.outcome import Record
from ladder.machine.cache import cache_folder, keep
from ladder.machine.described import Machine
from ladder.machine.known_machine import facts_of
from ladder.search.ceiling import had_memory
from ladder.text import digest_of
from ladder.tuning.comparisons import LIBRARIES
from ladder.tuning.versions import package_versions
from ladder.workload.workload import Workload

_OLDEST_SECONDS = 30 * 86400.0
"""Chosen: a month. Versions, driver and cores are among the facts; what else changes does so slowly."""


@dataclass(frozen=True, kw_only=True)
class EarlierSteps:
    """Those of one workload on one machine. Where they cannot be read or written, nothing is known of any."""

    machine: Machine
    workload: Workload

    def read(self) -> tuple[tuple[str, float | None, float], ...]:
        """By candidate key: seconds of a micro-step without and with the optimizer; the former None if not measured."""
        if not self._are_kept:
            return ()
        oldest = time.time() - _OLDEST_SECONDS
        return tuple((key, micro, last) for key, (micro, last, at) in self._stored().items() if at >= oldest)

    def add(self, records: Sequence[Record], *, instead: bool = False) -> None:
        """Keep what `records` of a tune say, unless memory was too short to say it.

        `instead` of what earlier tunes said, which then no longer counts; otherwise beside it.
        """
        found = {
            record.candidate_key: (seen.accumulate_seconds, seen.boundary_seconds, time.time())
            for record in records
            if record.purpose == "measure" and (seen := record.measurement) is not None
            if had_memory(seen, self.machine.memory_limit)
        }
        if found and self._are_kept:
            before = {} if instead else self._stored()
            keep(self._file, {"facts": self._facts, "steps": {**before, **found}})

    @property
    def _are_kept(self) -> bool:
        """A script's steps depend on its data, and nothing is known of the libraries on other nodes."""
        return self.workload.script is None and self.machine.num_nodes == 1

    @property
    def _facts(self) -> dict[str, Any]:
        one_batch = replace(self.workload, global_batch_size=self.machine.world_size)
        return {
            "machine": facts_of(self.machine),
            "libraries": package_versions(LIBRARIES),
            "allocator": self.machine.allocator,
            "workload": one_batch.fingerprint(),
        }

    @property
    def _file(self) -> Path:
        return cache_folder() / "steps" / f"{digest_of(self._facts, 16)}.json"

    def _stored(self) -> dict[str, tuple[float | None, float, float]]:
        """Empty if there is no file, or one that is damaged or of another machine."""
        try:
            content = json.loads(self._file.read_text(encoding="utf-8"))
            if content["facts"] != json.loads(json.dumps(self._facts)):
                return {}
            return {
                str(key): (None if micro is None else _positive(micro), _positive(last), float(at))
                for key, (micro, last, at) in content["steps"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}


def _positive(seconds: Any) -> float:
    """ValueError for what is no time."""
    if not 0 < float(seconds) < float("inf"):
        raise ValueError(seconds)
    return float(seconds)
