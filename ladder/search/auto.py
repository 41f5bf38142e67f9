"""The default strategy: runs a trial only if it can change the answer.

Two models answer two questions: the memory model gives the probability that a candidate fits, and the speed model how
fast it is with the user's accumulation. The next trial is of the engine with the largest expected gain over the best so
far per second of the trial; within a trial, only candidates that may be the engine's best are measured. The search ends
when no candidate left is faster than the best by more than the tolerance with a probability of more than 10 %, or when
their expected gain is negligible.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ladder.backends.registry import is_main
from ladder.candidates import Engine
from ladder.events.outcome import Record
from ladder.search.belief import LIKELY, SLIM, Belief, Outlook, believe
from ladder.search.ceiling import plainer
from ladder.search.cost import candidate_seconds, expected_seconds, start_of
from ladder.search.decisions import Measure, Stop
from ladder.search.probes import probe_first
from ladder.search.second_chance import second_chance
from ladder.search.space import Space, fastest, measured, ranking, ruled_out
from ladder.search.speed import STEP_NOISE

_SURE_ENOUGH = 0.9
"""A trial begins with a candidate at least this likely to fit, so that it measures something. Chosen: a higher value
would choose slower candidates, which tell less about the engine's best."""
_MOST = 3
"""The most candidates of one trial; their results decide about the others. Chosen: few, since an engine that is worth
it gets another trial."""
_HOPELESS_ENGINES = 3
"""If nothing is likely to fit, this many engines are tried before the search gives up. Chosen: all engines share the
memory model, and three failures confirm it."""
_NO_BEST = 0.7
"""While nothing is measured, gains are relative to this share of the highest expected speed. Chosen: low enough that
several engines have a gain, so that their costs decide."""
_QUANTILE = 1.645
"""For candidates of one engine, which share nearly all uncertainty. Chosen: the 95 % quantile of a normal distribution,
while the search as a whole uses 90 %."""
_CHEAP_QUANTILE = 2.3
"""As `_QUANTILE`, in a running trial, for a candidate whose steps take less time than the engine's start. Chosen by a
case of benchmarks/search.py that lost more than 5 % without it; for all candidates, it would cost a third more on the
recorded sweep of Llama-2-7B (benchmarks/results/search)."""
_NEXT_TO_NOTHING = 0.25
"""Of the tolerance: a candidate whose expected gain, including its probability to fit, is less is not worth a trial.
Chosen by the recorded sweep of Llama-2-7B and by simulated machines 1000 to 1015 (benchmarks/results/search)."""
_TRAINING_SECONDS = 3600.0
"""A trial's expected gain has to save, in a training of this length, the seconds of the trial, unless it is above the
tolerance. Chosen: people tune for longer trainings; the search takes 5 to 9 % less time, and no case is worse
(benchmarks/results/search)."""
ONE_IN_TEN = "with a chance of one in ten"
"""In output, of the speed that a candidate exceeds with a probability of only 10 % (`Outlook.optimistic`)."""


@dataclass(frozen=True)
class StillToGain:
    """What can still be gained: at the 90 % upper end, a candidate left is faster than the best by `faster`."""

    faster: float
    minutes: float
    """The time of the trial that would be next."""
    then: float
    """The bound without the candidates of that trial."""
    than: float
    """Tokens/s of the fastest trial; not of a proof, because predictions are for trials."""

    def sentence(self) -> str:
        """The bound in words, with the cost of a tighter one. The ledger uses the same words for each candidate."""
        best = f"the fastest trial ({self.than:,.0f} tokens/s)"
        if self.faster <= 0:
            return f"no candidate left is faster than {best} {ONE_IN_TEN} or more"
        price = f"another {self.minutes:.1f} minutes would make that {max(0.0, self.then):.1%}"
        return f"no candidate left is more than {self.faster:.1%} faster than {best} {ONE_IN_TEN} or more; {price}"


@dataclass(frozen=True)
class _Offer:
    """A possible next trial."""

    engine: Engine
    outlooks: tuple[Outlook, ...]
    gain: float
    """Expected gain over the best so far, as a fraction."""
    seconds: float


def auto(space: Space, records: Sequence[Record]) -> Measure | Stop:
    """The trial with the largest expected gain per second, or the end of the search with its bound."""
    return auto_without(frozenset(), believe(space, records), records)


def auto_without(late: Collection[str], belief: Belief, records: Sequence[Record]) -> Measure | Stop:
    """As `auto`, but for the candidates with the keys `late`, for which no time is left."""
    space = belief.space
    left = _left(space, records, belief)
    best = fastest(records)
    speed = best.tokens_per_second if best is not None else None
    in_time = [each for each in left if each.candidate.key not in late]
    worth = [each for each in in_time if speed is None or is_worth_a_trial(each, speed, space.tolerance)]
    if not worth:
        if (again := second_chance(space, records)) is not None:
            return again
        own = belief.of_this_tune
        if own is not belief:  # what trials did not confirm may decide what comes first, and not what is left out
            return auto_without(late, own, records)
        if not left:
            return Stop("every candidate was measured, ruled out by a failure, or cannot fit")
        if speed is None:
            return Stop("no time is left for a candidate that may fit")
        return Stop(_bound(belief, left, speed).sentence())
    offer = _plainer_first(belief, worth, _best_offer(belief, worth, speed), speed)
    if (probe := _probe_first(belief, records, offer, worth, speed)) is not None:
        return probe
    candidates = tuple(each.candidate for each in offer.outlooks)
    return Measure(offer.engine, candidates, _reason(offer, speed), _first_within(belief, offer.outlooks, speed))


def hopeful(space: Space, records: Sequence[Record], belief: Belief) -> list[Outlook]:
    """The candidates that were not tried and may be faster than the best."""
    best = fastest(records)
    to_beat = (best.tokens_per_second or 0.0) if best is not None else 0.0
    return [each for each in _left(space, records, belief) if each.optimistic > to_beat]


def hopeful_engines(space: Space, records: Sequence[Record]) -> list[Engine]:
    """The engines of `hopeful` candidates, in the space's order."""
    engines = {each.candidate.engine for each in hopeful(space, records, believe(space, records))}
    return [engine for engine in space.engines if engine in engines]


def _left(space: Space, records: Sequence[Record], belief: Belief) -> list[Outlook]:
    """The candidates that may fit and were neither tried nor ruled out, by engine."""
    tried = measured(records)
    outlooks = [
        belief.outlook(candidate)
        for candidate in space.candidates
        if candidate.key not in tried and ruled_out(candidate, space, records) is None
    ]
    likely = [outlook for outlook in outlooks if outlook.fits >= SLIM]
    if likely or ranking(records):
        return likely
    # Nothing fits so far and nothing is predicted to fit. The prediction may be wrong, so try a few engines.
    failed = {space.by_key[key].engine for key in tried if key in space.by_key}
    hopeful = sorted(outlooks, key=lambda outlook: (-outlook.fits, outlook.memory.peak))
    return hopeful[:1] if len(failed) < _HOPELESS_ENGINES else []


def _bound(belief: Belief, left: Sequence[Outlook], speed: float) -> StillToGain:
    if not left:
        return StillToGain(0.0, 0.0, 0.0, speed)
    top = max(left, key=lambda outlook: outlook.optimistic)
    own = [outlook for outlook in left if outlook.candidate.setup == top.candidate.setup]
    others = [outlook.optimistic for outlook in left if outlook.candidate.setup != top.candidate.setup]
    offer = _offer(belief, own, speed)
    return StillToGain(top.optimistic / speed - 1, offer.seconds / 60, max(others, default=0.0) / speed - 1, speed)


def _best_offer(belief: Belief, worth: Sequence[Outlook], speed: float | None) -> _Offer:
    by_setup = defaultdict(list)
    for each in worth:
        by_setup[each.candidate.setup].append(each)
    offers = [_offer(belief, own, _to_beat(worth, speed)) for own in by_setup.values()]
    if speed is None and belief.earlier.steps:  # if this trial confirms what is known, it may be the only one
        return max(offers, key=lambda offer: offer.gain)
    return max(offers, key=lambda offer: offer.gain / offer.seconds)


def _to_beat(worth: Sequence[Outlook], speed: float | None) -> float:
    """The best speed so far, or what stands for it before anything is measured."""
    if speed is not None:
        return speed
    return _NO_BEST * max(each.speed.tokens_per_second * max(each.fits, SLIM) for each in worth)


def _plainer_first(belief: Belief, worth: Sequence[Outlook], offer: _Offer, speed: float | None) -> _Offer:
    """The trial of an engine that does the same with less work, if one is left: once measured, it bounds the other.

    With several ranks only without DeepSpeed, whose stages are programs of their own that differ by more than a
    prediction may decide. FSDP2 is one program: without resharding it was 1.6 and 4 % faster (measured on H100s).
    """
    top = max(offer.outlooks, key=lambda each: each.tokens_per_second * each.fits)
    if belief.space.world_size > 1 and is_main(top.candidate.engine.rung):
        return offer
    rivals = {each.candidate: each for each in worth if each.fits >= _SURE_ENOUGH}
    for other in plainer(top.candidate, belief.space.world_size):
        if (found := rivals.get(other)) is not None and other.engine not in belief.measured_engines:
            own = [each for each in worth if each.candidate.setup == found.candidate.setup]
            return _plainer_first(belief, worth, _offer(belief, own, _to_beat(worth, speed)), speed)
    return offer


def _offer(belief: Belief, own: Sequence[Outlook], speed: float) -> _Offer:
    """The trial of one engine: its candidates in ascending memory, its gain and its cost."""
    chosen = _chosen(belief, own)
    gain = max(each.gain_over(speed) for each in chosen)
    target = speed * (1 + belief.space.tolerance)
    scouts = [each for each in own if each.fits >= _SURE_ENOUGH and each.memory.peak <= chosen[0].memory.peak]
    if not belief.measured_engines:  # then the others run in any case (`_first_within`)
        scouts = []
    prices: dict[tuple[Outlook, ...], float] = {}
    for scout in (chosen[0], *scouts):
        order = (scout, *(each for each in chosen if each is not scout))
        if order not in prices:
            prices[order] = _price(order, target)
    cheapest = min(prices, key=lambda order: (prices[order], order[0].memory.peak))
    return _Offer(cheapest[0].candidate.engine, cheapest, gain, prices[cheapest])


def _price(order: Sequence[Outlook], target: float) -> float:
    """Expected seconds of a trial whose first candidate decides whether the others may still reach `target` tokens/s.

    An engine that is too slow only costs its first candidate: a small micro-batch shows nearly as much as a large one.
    """
    first, rest = order[0], order[1:]
    seconds = expected_seconds([first])
    for each in rest:
        seconds += each.still_possible(target, first, _QUANTILE) * candidate_seconds(each)
    return seconds


def _chosen(belief: Belief, own: Sequence[Outlook]) -> tuple[Outlook, ...]:
    """The candidates that may be the engine's fastest, and one that is sure to fit, in ascending predicted memory."""
    champion = max(own, key=_rank_within_engine)
    least_gain = math.log1p(belief.space.tolerance / 2)
    promises = {champion.candidate.key: math.inf}
    for each in own:
        mean, deviation = each.ahead_of(champion)
        if each is not champion and mean + _QUANTILE * deviation > least_gain:
            promises[each.candidate.key] = _promise(each, mean + deviation)
    keys = sorted(promises, key=lambda key: promises[key], reverse=True)[:_MOST]
    chosen = [each for each in own if each.candidate.key in keys]
    safe = [each for each in own if each.fits >= _SURE_ENOUGH]
    if safe and not any(each in safe for each in chosen):
        chosen.append(max(safe, key=lambda each: each.speed.tokens_per_second))
    return tuple(sorted(chosen, key=lambda each: (each.memory.peak, each.candidate.micro_batch)))


def _promise(outlook: Outlook, ahead: float) -> float:
    """The value of a candidate that may be `ahead` (a logarithm), reduced if it may not fit.

    By a tenth of the probability's logarithm: one that fits with 50 % equals one that surely fits and is 7 % slower.
    """
    return ahead + math.log(outlook.fits + 1e-9) / 10


def _rank_within_engine(outlook: Outlook) -> tuple[bool, float, float]:
    """A sort key: the largest is the fastest candidate that is likely to fit, or else the most likely one."""
    is_likely = outlook.fits >= LIKELY
    return is_likely, outlook.speed.tokens_per_second if is_likely else 0.0, outlook.fits


def _first_within(belief: Belief, chosen: Sequence[Outlook], speed: float | None) -> dict[str, float]:
    """For each other candidate: the longest step of the first of `chosen`, in seconds, with which it may still win.

    An engine's candidates share most uncertainty, so measuring the first one usually decides about all.
    """
    if speed is None:
        return {}
    workload, target = belief.space.workload, speed * (1 + belief.space.tolerance)
    longest = {}
    paid = start_of(chosen[0].candidate, workload)
    for each in chosen[1:]:
        mean, deviation = each.ahead_of(chosen[0])
        quantile = _CHEAP_QUANTILE if candidate_seconds(each) < paid else _QUANTILE
        slowest = target / math.exp(mean + quantile * math.hypot(deviation, STEP_NOISE))
        longest[each.candidate.key] = workload.tokens_per_step / slowest
    return longest


def is_worth_a_trial(outlook: Outlook, speed: float, tolerance: float) -> bool:
    """Whether it may exceed `speed`, in tokens/s, by more than the tolerance, and its expected gain is large enough."""
    if outlook.optimistic <= speed * (1 + tolerance):
        return False
    pays = min(tolerance, expected_seconds([outlook]) / _TRAINING_SECONDS)
    return outlook.gain_over(speed) > max(_NEXT_TO_NOTHING * tolerance, pays)


def _probe_first(
    belief: Belief, records: Sequence[Record], offer: _Offer, worth: Sequence[Outlook], speed: float | None
) -> Measure | None:
    """The probe to run before the trial of `offer`, if any; it is compared with the best so far, or other engines."""
    if speed is None:
        rivals = [each for each in worth if each.candidate.engine != offer.engine]
        target = max((each.speed.tokens_per_second * each.fits for each in rivals), default=0.0)
    else:
        target = speed * (1 + belief.space.tolerance)
    probe = probe_first(belief, records, offer.outlooks, offer.seconds, target) if target else ()
    if not probe:
        return None
    reason = f"{belief.space.probe_layers} layers before a trial of {offer.seconds:.0f} s; {_reason(offer, speed)}"
    return Measure(offer.engine, tuple(each.candidate for each in probe), reason, probe=True)


def _reason(offer: _Offer, speed: float | None) -> str:
    top = max(offer.outlooks, key=lambda each: each.tokens_per_second * each.fits)
    expected = f"{top.candidate.variant} is expected to reach {top.tokens_per_second:,.0f} tokens/s"
    if speed is None:
        return f"{expected}, the most for its price"
    fastest = max(each.optimistic for each in offer.outlooks) / speed - 1
    ahead = f"{abs(fastest):.0%} {'above' if fastest >= 0 else 'below'} the fastest trial"
    return f"{expected}; {ONE_IN_TEN} it is {ahead}"
