"""What earlier tunes of the workload measured on this machine, beside what was seen in this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import geometric_mean

from ladder.candidates import Candidate
from ladder.events.outcome import Record
from ladder.search.ceiling import Reached, had_memory
from ladder.search.space import Space
from ladder.search.speed import SpeedObservation

_NOISE = 0.03
"""Relative error of what an earlier tune measured. Chosen: proofs, minutes after their trials, are off by 1 to 3 %."""
_REPEATS = 1.05
"""Within this factor, a trial confirms what an earlier tune measured. Chosen: as far as a host's speed strays, while a
GPU that others use, or that is throttled, strays further."""
Steps = Mapping[Candidate, tuple[float | None, float]]
"""Seconds of micro-steps without (None: unknown) and with the optimizer."""


@dataclass(frozen=True, eq=False)
class Earlier:
    """The steps in `space.earlier`, of which trials of this tune, which were `seen`, may repeat some."""

    space: Space
    seen: Sequence[tuple[Candidate, Record]]

    @cached_property
    def steps(self) -> Steps:
        """What earlier tunes measured, unless a trial of this tune contradicts it; then nothing of it is used."""
        return {} if self.is_contradicted else self._found

    @cached_property
    def is_contradicted(self) -> bool:
        """Whether a step took longer than in an earlier tune, or less long, by more than `_REPEATS`."""
        return any(not 1 / _REPEATS < pace < _REPEATS for pace in self._paces)

    @cached_property
    def pace(self) -> float | None:
        """Seconds of a step in this tune over those of the same in earlier ones.

        None if none was measured again, or if one contradicts. If one was, the times of all others count too.
        """
        return geometric_mean(self._paces) if self._paces and not self.is_contradicted else None

    @property
    def confirmed(self) -> Steps:
        """The steps, once a trial of this tune has repeated one."""
        return self.steps if self.pace else {}

    def shown(self) -> list[Reached]:
        """The speeds that candidates reached, at this tune's pace, as far as that is confirmed."""
        tokens, pace = self.space.workload.tokens_per_step, self.pace or 1.0
        return [
            Reached(candidate, tokens / (((candidate.accumulation - 1) * (micro or 0.0) + last) * pace))
            for candidate, (micro, last) in self.confirmed.items()
            if micro is not None or candidate.accumulation == 1
        ]

    def observations(self) -> list[SpeedObservation]:
        """The steps that were not measured again."""
        again = {candidate for candidate, _ in self.seen}
        return [
            SpeedObservation(candidate=candidate, accumulate_seconds=micro, boundary_seconds=last, noise=_NOISE)
            for candidate, (micro, last) in self.steps.items()
            if candidate not in again
        ]

    @cached_property
    def _found(self) -> Steps:
        by_key = self.space.by_key
        return {by_key[key]: (micro, last) for key, micro, last in self.space.earlier if key in by_key}

    @cached_property
    def _paces(self) -> list[float]:
        """Of the steps that were measured again, with memory to spare.

        The very same time is this run's own, of before it was resumed, and confirms nothing.
        """
        again = [(self._found[each], record.measurement) for each, record in self.seen if each in self._found]
        return [
            found.boundary_seconds / last
            for (_, last), found in again
            if found is not None and found.boundary_seconds != last
            if had_memory(found, self.space.memory_limit)
        ]
