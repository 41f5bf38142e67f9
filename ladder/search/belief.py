"""Predictions for candidates, calibrated by the history: whether they fit, how fast they are, and how certain it is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import NormalDist

from ladder.candidates import Candidate, Engine
from ladder.events.outcome import Record
from ladder.machine.machine_speed import MachineSpeed, known_speed, machine_speed
from ladder.search.ceiling import Reached, most_of, plainer, shown, twins
from ladder.search.earlier import Earlier
from ladder.search.memory import (
    UPPER_DEVIATIONS,
    MemoryCalibration,
    MemoryObservation,
    MemoryPrediction,
    calibrate_memory,
    host_ratios,
    predict_host,
    predict_memory,
)
from ladder.search.observed import memory_observation, speed_observation
from ladder.search.space import Space, measured, probed
from ladder.search.speed import (
    STEP_NOISE,
    SpeedCalibration,
    SpeedPrediction,
    calibrate_speed,
    predict_speed,
)
from ladder.workload.workload import Workload

HOST_DEVIATION = 0.10
"""Relative error of predicted host memory. Chosen: it was within 6 % on one machine, and may be larger on others."""
_CLEARLY = 1.05
"""A larger micro-batch that promises less than this factor cannot make up for still less memory. Chosen: of five pairs
that promised 6 to 32 %, four were faster (benchmarks/results/runs); of a pair that promises less, none is known."""
_CONTRADICTED = 1.5
"""If trials are further from the prior than this many times what it expects, what is known of the machine is compared
with data sheets, and the one that surprises less is used. Chosen: a right measurement seldom surprises by half more."""
SLIM = 0.03
"""A candidate less likely to fit than this is not tried. Chosen: thirty failed trials for one that fits are too
many."""
LIKELY = 0.5
"""A candidate at least this likely to fit is predicted to fit. Chosen: more likely than not."""
_NORMAL = NormalDist()
QUANTILE_90 = 1.28
"""Derived: the 90 % quantile of a normal distribution, in standard deviations."""


@dataclass(frozen=True)
class Outlook:
    """The predictions for one candidate; each is computed when it is first needed."""

    candidate: Candidate
    belief: Belief = field(repr=False)
    shallow: bool = False
    """For a probe: the model has a few layers, and only the speed counts."""

    @property
    def workload(self) -> Workload:
        return self.belief.space.shallow if self.shallow else self.belief.space.workload

    @cached_property
    def memory(self) -> MemoryPrediction:
        space = self.belief.space
        return predict_memory(
            space.workload,
            self.candidate,
            world_size=space.world_size,
            device=space.device,
            calibration=self.belief.memory,
            started=self.candidate.engine.states in self.belief.started,
        )

    @cached_property
    def host(self) -> int:
        """Bytes of host memory of all ranks, as in `memory`, but without computing GPU memory."""
        space = self.belief.space
        return predict_host(space.workload, self.candidate, space.world_size, self.belief.host_ratios)[0]

    @cached_property
    def speed(self) -> SpeedPrediction:
        space = self.belief.space
        return predict_speed(
            self.workload,
            self.candidate,
            world_size=space.world_size,
            machine=self.belief.machine,
            calibration=self.belief.speed,
            shallow=self.shallow,
        )

    @cached_property
    def fits(self) -> float:
        """The probability that it fits, on the GPUs and on the host."""
        memory, space = self.memory, self.belief.space
        if memory.host >= self.belief.host_ceiling:
            return 0.0
        deviation = max(1.0, (memory.upper - memory.peak) / UPPER_DEVIATIONS)
        on_device = _NORMAL.cdf((space.memory_limit - memory.peak) / deviation)
        return on_device * _NORMAL.cdf((space.host_memory / memory.host - 1) / HOST_DEVIATION)

    @property
    def deviation(self) -> float:
        """The standard deviation of the logarithm of its speed."""
        return self.speed.deviation

    @property
    def tokens_per_second(self) -> float:
        """The expected speed, at most that of its `ceilings` and `most`."""
        return min(self.most, *(each.speed.tokens_per_second for each in self._limits))

    @property
    def optimistic(self) -> float:
        """Tokens/s that it exceeds with a probability of only 10 %."""
        return min(self.most, *(each.speed.tokens_per_second * each._doubt for each in self._limits))

    @property
    def pessimistic(self) -> float:
        """Tokens/s that it stays below with a probability of only 10 %."""
        return min(self.most, *(each.speed.tokens_per_second / each._doubt for each in self._limits))

    @property
    def is_held(self) -> bool:
        """Whether what was measured of the same steps is all that keeps its expected speed from being higher."""
        return self.most < min(each.speed.tokens_per_second for each in self._limits)

    @property
    def _limits(self) -> tuple[Outlook, ...]:
        return (self, *self.ceilings)

    @property
    def _doubt(self) -> float:
        """The factor between its expected speed and either end."""
        return math.exp(QUANTILE_90 * math.hypot(self.deviation, STEP_NOISE))

    def gain_over(self, speed: float) -> float:
        """The expected gain over `speed`, in tokens/s, as a fraction, times the probability that it fits."""
        alone = (expected_gain(each.speed.tokens_per_second, each.deviation, over=speed) for each in self._limits)
        return self.fits * min(max(0.0, self.most / speed - 1), *alone)

    @cached_property
    def most(self) -> float:
        """Tokens/s that it cannot exceed, as it, `ceilings`, twins or other micro-batches of these reached no more.

        What lacked memory says nothing of engines that need less of it.
        """
        if self.shallow:
            return math.inf
        belief = self.belief
        undisturbed = [each for each in belief.shown if not each.emptied]
        others = {each.candidate for each in self.ceilings}.union(twins(self.candidate, belief.space))
        return min(
            most_of(self.candidate, belief.shown, belief.space, self._promises_more_than),
            *(most_of(each, undisturbed, belief.space, self._promises_more_than) for each in others),
            math.inf,
        )

    def _promises_more_than(self, other: Candidate) -> bool:
        """Whether it is predicted to be clearly faster than `other`, with memory enough for both."""
        return self.speed.tokens_per_second > _CLEARLY * self.belief.outlook(other).speed.tokens_per_second

    @cached_property
    def ceilings(self) -> tuple[Outlook, ...]:
        """What it cannot exceed: itself with less work (`plainer`) or the same (`twins`), on measured engines.

        None once its own engine is measured: what it does here says more than what it should do.
        """
        known = self.belief.known_engines
        if self.candidate.engine in self.belief.measured_engines:
            return ()
        space = self.belief.space
        others = (*plainer(self.candidate, space.world_size), *twins(self.candidate, space))
        return tuple(self.belief.outlook(each) for each in others if each.engine in known)

    def ahead_of(self, other: Outlook) -> tuple[float, float]:
        """How much faster this is than `other`, as a logarithm, with the standard deviation.

        Unknowns that both share, such as an engine's own factor, cancel.
        """
        difference = other.speed.estimate.minus(self.speed.estimate)
        return difference.mean, self.belief.speed.fit.deviation(difference)

    def still_possible(self, target: float, after: Outlook, quantile: float) -> float:
        """The probability that `target`, in tokens/s, still seems possible for it once `after` is measured.

        That is the case if it is at most `quantile` of the remaining standard deviations away.
        """
        _, left = self.ahead_of(after)
        left = math.hypot(left, STEP_NOISE)
        learnt = math.sqrt(max(1e-9, self.deviation**2 - left**2))
        mean = math.log(self.speed.tokens_per_second / target)
        return _NORMAL.cdf((mean + quantile * left) / learnt)


@dataclass(frozen=True, eq=False)
class Belief:
    """Both models, each calibrated by a history when it is first needed."""

    space: Space
    seen: Sequence[tuple[Candidate, Record]]
    """Candidates that were measured."""
    probed: Sequence[tuple[Candidate, Record]] = ()
    """Candidates that were probed."""
    _outlooks: dict[tuple[Candidate, bool], Outlook] = field(default_factory=dict, init=False, repr=False)

    def outlook(self, candidate: Candidate, *, shallow: bool = False) -> Outlook:
        """The predictions for `candidate`, or for a probe of it; each is computed once."""
        if (found := self._outlooks.get((candidate, shallow))) is None:
            found = self._outlooks[candidate, shallow] = Outlook(candidate, self, shallow)
        return found

    @cached_property
    def of_this_tune(self) -> Belief:
        """The same without what was known before this tune, but for steps that its trials confirm; or itself."""
        space = self.space
        own = replace(space, rates=(), learned=(), earlier=space.earlier if self.earlier.pace else ())
        return self if own == space else Belief(own, self.seen, self.probed)

    @cached_property
    def earlier(self) -> Earlier:
        """What earlier tunes measured."""
        return Earlier(self.space, self.seen)

    @cached_property
    def shown(self) -> list[Reached]:
        """The speeds that candidates reached, in this tune and in earlier ones."""
        found = [
            shown(candidate, record.tokens_per_second, record.measurement, self.space.memory_limit)
            for candidate, record in self.seen
            if record.measurement is not None and record.tokens_per_second
        ]
        return [*found, *self.earlier.shown()]

    @property
    def machine(self) -> MachineSpeed:
        """The machine's speeds before any trial: as measured, unless this tune's trials contradict the measurement."""
        return self._calibrated[0]

    @property
    def speed(self) -> SpeedCalibration:
        return self._calibrated[1]

    @cached_property
    def measured_engines(self) -> frozenset[Engine]:
        """Those with a candidate that was measured."""
        return frozenset(candidate.engine for candidate, record in self.seen if record.measurement is not None)

    @cached_property
    def known_engines(self) -> frozenset[Engine]:
        """Those, and what earlier tunes measured, where this one confirms it."""
        return self.measured_engines | frozenset(each.engine for each in self.earlier.confirmed)

    @cached_property
    def started(self) -> frozenset[str]:
        """The states of those engines; another one with the same states starts too."""
        return frozenset(engine.states for engine in self.measured_engines)

    @cached_property
    def trusts_what_is_known(self) -> bool:
        """Whether what was measured and learned about the machine before this tune agrees with its trials."""
        return self._calibrated[2]

    @cached_property
    def _calibrated(self) -> tuple[MachineSpeed, SpeedCalibration, bool]:
        space = self.space
        sheets = machine_speed(space.gpu_name, space.device, space.world_size, space.num_cores, space.num_nodes)
        learned = {name: (mean, deviation) for name, mean, deviation in space.learned}
        rates = dict(space.rates)
        if space.num_nodes == 1:  # the rates of several nodes may foretell one
            rates.pop("network_bytes", None)
        known = known_speed(sheets, rates, learned)
        speed = self._calibrated_from(known)
        if known is not sheets and speed.fit.surprise > _CONTRADICTED:
            without = self._calibrated_from(sheets)
            if without.fit.surprise < speed.fit.surprise:
                return sheets, without, False
        return known, speed, True

    @cached_property
    def _memory_seen(self) -> list[MemoryObservation]:
        return [found for pair in self.seen if (found := memory_observation(self.space, *pair)) is not None]

    @cached_property
    def memory(self) -> MemoryCalibration:
        space = self.space
        return calibrate_memory(space.workload, self._memory_seen, world_size=space.world_size, device=space.device)

    @cached_property
    def host_ratios(self) -> dict[str, float]:
        """Measured divided by predicted host memory by engine, and for all engines under ""."""
        fitting = [seen for seen in self._memory_seen if seen.fits]
        return host_ratios(self.space.workload, fitting, self.space.world_size)

    def _calibrated_from(self, machine: MachineSpeed) -> SpeedCalibration:
        space = self.space
        pairs = (*self.seen, *self.probed)
        observations = [found for pair in pairs if (found := speed_observation(space, *pair)) is not None]
        observations += self.earlier.observations()
        return calibrate_speed(space.workload, observations, world_size=space.world_size, machine=machine)

    @cached_property
    def host_ceiling(self) -> float:
        """The least predicted host memory, in bytes, with which a trial ran out of it; infinite if none did."""
        out = [candidate for candidate, record in self.seen if record.outcome.kind in ("host_oom", "pinned_oom")]
        return min((self.outlook(candidate).host for candidate in out), default=math.inf)


_recent: deque[Belief] = deque(maxlen=16)
"""The last beliefs: the search, its budget, the live view and the reports ask for the same ones, the reports for that
before each trial too. Chosen: as many as most tunes have trials; one of 500 candidates takes 2 MB (measured)."""


def believe(space: Space, records: Sequence[Record]) -> Belief:
    """The predictions for this space's candidates, calibrated by `records`; a proof among them teaches nothing more."""
    seen, shallow = (
        [(space.by_key[key], record) for key, record in found.items() if key in space.by_key]
        for found in (measured(records), probed(records))
    )
    for known in tuple(_recent):  # another thread may add to it
        if known.space is space and _same(known.seen, seen) and _same(known.probed, shallow):
            return known
    belief = Belief(space, seen, shallow)
    _recent.append(belief)
    return belief


def _same(some: Sequence[tuple[Candidate, Record]], others: Sequence[tuple[Candidate, Record]]) -> bool:
    """Whether they have the same records, and not only equal ones, in the same order."""
    return len(some) == len(others) and all(one is other for (_, one), (_, other) in zip(some, others, strict=True))


def expected_gain(tokens_per_second: float, deviation: float, *, over: float) -> float:
    """The expected gain over the speed `over`, as a fraction, of a log-normal speed around `tokens_per_second`.

    `deviation` is the standard deviation of its logarithm. A loss counts as no gain: nobody would choose it.
    """
    deviation, mean = max(deviation, 1e-6), math.log(tokens_per_second / over)
    ahead = math.exp(mean + deviation**2 / 2) * _NORMAL.cdf(mean / deviation + deviation)
    return max(0.0, ahead - _NORMAL.cdf(mean / deviation))
