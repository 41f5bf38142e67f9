"""What a training will reach: the speed of the proof, or a range where the speed of the machine varies."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

from ladder.candidates import Candidate
from ladder.events.outcome import Record

_KEPT = 0.03
"""A promise of one figure: a training reaches it within this fraction. Chosen: on machines with a steady speed, the
trainings of TRL's scripts did (measured by benchmarks/promise.py; results/1xh200-scripts)."""

_APART = 0.1
"""If the speeds of a proof and its trial differ by more than this fraction, a warning says so. Chosen: on a busy shared
host, one candidate reached 28,676, 31,936 and 32,477 tokens/s within eight minutes (measured)."""

_WINDOWS, _STEPS = 5, 4
"""Into how many windows the steps of a proof are divided at most, and how many steps each has at least. Derived: if the
windows vary at random, the speed of a long training lies between the slowest of five and the fastest in 15 of 16
cases. Chosen: one disturbed step among four, 10 % longer, moves their mean by less than `_KEPT`."""

_BUSY, _OF_THE_CPU = 0.6, 0.2
"""GPUs that are busy for less of a proof's time wait for the CPU to launch their kernels; and by how much the speed of
such a training may differ from its proof's. Chosen: of GPUs that computed all the time, NVML said 0.74 to 0.99, and
0.22 to 0.46 of opt-125m's. 11 of 13 trainings of that model were within a fifth of their promise, while 20 of their
steps took 1.5 to 2.1 s in one and the same training (measured by benchmarks/promise.py; results/1xh200-scripts)."""

_NOTICEABLE = 0.05
"""Of a training's time: what new lengths of batches cost is worth a word from here on. Chosen: more than differences
between candidates that are not noise."""


def window_speeds(steps: Sequence[float], promised: float) -> tuple[float, ...]:
    """Speeds of consecutive windows of timed steps, over that of a step of `promised` seconds.

    Means, not medians: a training's speed includes its slow steps.
    """
    count = max(1, min(_WINDOWS, len(steps) // _STEPS))
    ends = [len(steps) * number // count for number in range(count + 1)]
    return tuple(promised / statistics.fmean(steps[first:end]) for first, end in pairwise(ends))


def promised_range(
    candidate: Candidate, proof: Record, trial: Record | None, before: Sequence[Record] = ()
) -> tuple[float, float] | None:
    """The lowest and the highest tokens/s of a training, or None if the one figure of its `proof` is good enough.

    These are the extremes of the proof, of the windows of its steps, of the proofs `before` it, and of the `trial` of
    the same candidate, all of which ran at other times; where the CPU sets the pace, also a fifth less and more than
    the proof.
    """
    speed = proof.tokens_per_second
    if not speed or proof.measurement is None:
        return None
    speeds = [speed, *(speed * window for window in proof.measurement.window_speeds)]
    speeds += [each.tokens_per_second for each in before if each.tokens_per_second]
    if (other := _comparable(proof, trial)) is not None:
        speeds.append(other)
    if is_paced_by_cpu(candidate, proof):
        speeds += [(1 - _OF_THE_CPU) * speed, (1 + _OF_THE_CPU) * speed]
    low, high = min(speeds), max(speeds)
    return (low, high) if low < (1 - _KEPT) * speed or high > (1 + _KEPT) * speed else None


def is_paced_by_cpu(candidate: Candidate, proof: Record) -> bool:
    """Whether the GPUs spent much of a proof waiting for kernels to be launched.

    Adam on the CPU makes them wait too, but other programs do not change its speed from one minute to the next.
    """
    used = proof.measurement.utilisation if proof.measurement is not None else None
    return used is not None and used < _BUSY and not candidate.engine.rung.devices


def paced_by_cpu(candidate: Candidate, proof: Record) -> str:
    """A warning if it is so; otherwise empty."""
    if proof.measurement is None or not is_paced_by_cpu(candidate, proof):
        return ""
    return (
        f"the GPUs were busy for only {proof.measurement.utilisation:.0%} of the proof: the CPU, which launches their "
        "kernels, sets the pace, and its speed changes with whatever else it does; so the speed is promised as a range"
    )


def new_lengths(candidate: Candidate, trial: Record | None) -> str:
    """A warning if much of a script's training goes into batches of new lengths, by its `trial`; otherwise empty."""
    seen = trial.measurement if trial is not None else None
    if seen is None or not seen.new_length_seconds or not seen.new_length_share:
        return ""
    micro = seen.step_seconds(candidate.accumulation) / candidate.accumulation
    part = seen.new_length_share * seen.new_length_seconds / micro
    if part < _NOTICEABLE:
        return ""
    return (
        f"{part:.0%} of an epoch goes into batches of a length that none before had, {seen.new_length_seconds:.2g} s "
        "for each, in which kernels are made ready for it: let the script pad its batches to a multiple of 64 tokens "
        "(TRL: --pad_to_multiple_of 64)"
    )


def apart(proof: Record, trial: Record | None) -> str:
    """A warning if a proof's speed differs from that of its candidate's trial; otherwise empty."""
    other, speed = _comparable(proof, trial), proof.tokens_per_second
    if other is None or trial is None or not trial.tokens_per_second or not speed or abs(speed / other - 1) < _APART:
        return ""
    difference = speed / trial.tokens_per_second - 1
    which = f"{abs(difference):.0%} {'faster' if difference > 0 else 'slower'}"
    return (
        f"its proof was {which} than its trial, so its speed is promised as a range, and smaller differences between "
        "candidates here may be noise"
    )


def _comparable(proof: Record, trial: Record | None) -> float | None:
    """The speed of `trial` if it had waited for a script's data loader like `proof`; None if they cannot be compared.

    A trial's batches are there already. A proof's wait makes its step longer by at most that time, and by less if the
    GPU still computes meanwhile. Whatever this explains of the difference is not noise. A loader that sets the pace
    also takes cores from the ranks, so then the trial says nothing.
    """
    if trial is None or not trial.tokens_per_second or not proof.tokens_per_second:
        return None
    waits = (proof.measurement.loader_share or 0.0) if proof.measurement is not None else 0.0
    if waits > _APART:
        return None
    return min(max(proof.tokens_per_second, (1 - waits) * trial.tokens_per_second), trial.tokens_per_second)
