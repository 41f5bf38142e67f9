"""Predicts the fastest candidate on another number of GPUs from what was measured on smaller numbers.

The speed model has the same unknowns on every number of GPUs, so a measurement on one tells something of the others.
Each prediction is linearised in these unknowns around the data sheets, and one fit takes the measurements of all
counts together. What a network between nodes adds is doubted separately until it was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ladder.events.outcome import Record
from ladder.search.belief import LIKELY, Belief, Outlook, believe
from ladder.search.calibration import Datum, Estimate, Fit, Unknowns, fit
from ladder.search.forecast import SURE
from ladder.search.memory import MemoryCalibration
from ladder.search.space import Space, measured
from ladder.search.speed import STEP_NOISE

_NOISE = 0.05
"""Relative error of a measurement as data for another number of GPUs. Chosen: above the noise of a step, because the
formula is linearised."""
_OF_NETWORK = 0.3
"""Standard deviation (a logarithm) of the speed over several nodes if neither trials nor `ladder doctor` measured the
network. Chosen: the sheets say nothing of it."""
_QUANTILE_90 = 1.28
"""Derived: the 90 % quantile of a normal distribution, in standard deviations."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The candidate that is expected to be the fastest of those that fit."""

    outlook: Outlook
    tokens_per_second: float
    deviation: float
    """Standard deviation of the logarithm of the speed."""
    is_sure: bool
    """It fits with a probability of 99 %; otherwise it is only likely to fit."""

    @property
    def low(self) -> float:
        """It is slower than this with a probability of 10 %."""
        return self.tokens_per_second * math.exp(-_QUANTILE_90 * self.deviation)

    @property
    def high(self) -> float:
        """It is faster than this with a probability of 10 %."""
        return self.tokens_per_second * math.exp(_QUANTILE_90 * self.deviation)


@dataclass(frozen=True, eq=False)
class _Informed(Belief):
    """A belief whose memory model was calibrated on another number of GPUs."""

    known_memory: MemoryCalibration = field(default_factory=MemoryCalibration)

    @cached_property
    def memory(self) -> MemoryCalibration:
        return self.known_memory


class Scaling:
    """What runs on some numbers of GPUs say of other numbers. The runs must have the same workload and GPUs."""

    def __init__(self, runs: Sequence[tuple[Space, Sequence[Record]]]) -> None:
        self._fit = fit([datum for space, records in runs for datum in _data(space, records)])
        self._nodes = max((space.num_nodes for space, _ in runs), default=1)
        largest = max(runs, key=lambda run: run[0].world_size, default=None)
        self._memory = believe(*largest).memory if largest is not None else MemoryCalibration()

    def best(self, space: Space) -> Forecast | None:
        """The fastest candidate of `space` that surely fits, or else one that likely fits; None if none does."""
        belief = _Informed(space, (), known_memory=self._memory)
        outlooks = [belief.outlook(candidate) for candidate in space.candidates]
        ranked = sorted(outlooks, key=lambda each: -self._speed(each))
        for least in (SURE, LIKELY):
            found = next((each for each in ranked if each.fits >= least), None)
            if found is not None:
                return self._forecast(found, is_sure=least == SURE)
        return None

    def _speed(self, outlook: Outlook) -> float:
        seconds = _linear(outlook.speed.estimate, self._fit.values)
        return outlook.workload.tokens_per_step / math.exp(seconds)

    def _forecast(self, outlook: Outlook, *, is_sure: bool) -> Forecast:
        known: Fit = self._fit
        space = outlook.belief.space
        is_guess = space.num_nodes > 1 and self._nodes == 1 and "network_bytes" not in dict(space.rates)
        network = _OF_NETWORK if is_guess else 0.0
        deviation = math.hypot(known.deviation(outlook.speed.estimate), network, STEP_NOISE)
        speed = self._speed(outlook)
        return Forecast(outlook=outlook, tokens_per_second=speed, deviation=deviation, is_sure=is_sure)


def _linear(estimate: Estimate, unknowns: Unknowns) -> float:
    """The logarithm of a step's seconds, linear in the unknowns."""
    return estimate.mean + sum(slope * unknowns.get(name, 0.0) for name, slope in estimate.slopes.items())


def _data(space: Space, records: Sequence[Record]) -> list[Datum]:
    """Each measured step as data for the fit of all counts."""
    prior = believe(space, ())
    found = []
    for key, record in measured(records).items():
        if record.outcome.kind != "fits" or not record.tokens_per_second or key not in space.by_key:
            continue
        estimate = prior.outlook(space.by_key[key]).speed.estimate
        seconds = space.workload.tokens_per_step / record.tokens_per_second
        found.append(_datum(estimate, seconds))
    return found


def _datum(estimate: Estimate, seconds: float) -> Datum:
    return Datum(
        formula=lambda unknowns: _linear(estimate, unknowns),
        names=tuple(estimate.slopes),
        target=math.log(seconds),
        noise=_NOISE,
    )
