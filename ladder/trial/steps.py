"""Runs and times optimizer steps of one candidate after another in the same engine."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field, replace

from ladder.events.protocol import TrialSpec
from ladder.events.step_policy import CandidateSpec, StepPolicy
from ladder.trial.first_times import FirstTimes
from ladder.trial.reporter import Reporter
from ladder.trial.subject import Kind, Subject, most_of_ranks, synchronize
from ladder.trial.techniques import techniques_of

_NEW_LENGTHS, _MOST_NEW = 2, 4
"""Steps on batches of new lengths; and at most, if some do what a training does only once. Chosen: the first take
turns with such steps, and two show whether a new length costs anything."""
_LONG_MICRO_STEP = 1.0
"""Of a micro-step as long as this, in seconds, a new length is a small part and is not looked for. Chosen: cuDNN takes
0.12 to 0.14 s to prepare its attention for one (measured by trials of TRL's SFT on H100; results/1xh200-scripts)."""


@dataclass(frozen=True)
class Step:
    """One optimizer step: seconds of its micro-steps on the slowest rank."""

    accumulate: float | None
    """Median of the micro-steps without the optimizer; None without accumulation."""
    boundary: float
    """Of the micro-step with the optimizer."""
    seconds: float
    """Of a whole step with the candidate's own accumulation, which may be more than the trial's."""
    losses: list[float]
    skipped: bool
    """Because of an overflow."""

    @property
    def micro(self) -> float:
        """Seconds of a micro-step without the optimizer, or of the only one."""
        return self.boundary if self.accumulate is None else self.accumulate

    def later(self, seconds: float, candidate: CandidateSpec) -> Step:
        """The step of `candidate` with micro-steps that take so many `seconds` more."""
        accumulate = None if self.accumulate is None else self.accumulate + seconds
        boundary = self.boundary + seconds
        whole = candidate.step_seconds(accumulate, boundary)
        return replace(self, accumulate=accumulate, boundary=boundary, seconds=whole)


_NO_STEP = Step(None, math.inf, math.inf, [], skipped=False)


@dataclass(frozen=True)
class NewLength:
    """What a training pays for batches whose length no batch had before."""

    seconds: float
    """What a micro-step takes longer by it; 0 if nothing is seen."""
    share: float
    """Of the micro-steps: those with such a batch."""


@dataclass
class Timings:
    """All timed optimizer steps of a candidate."""

    steps: list[Step] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    skipped: int = 0
    new_length: NewLength | None = None
    """None where it was not looked for."""

    @property
    def accumulate(self) -> list[float]:
        """Seconds of a micro-step without the optimizer, by step; empty without accumulation."""
        return [step.accumulate for step in self.steps if step.accumulate is not None]

    @property
    def boundary(self) -> list[float]:
        """Seconds of the micro-step with the optimizer, by step."""
        return [step.boundary for step in self.steps]


class Stepper:
    """Runs whole optimizer steps, untimed ones with as many micro-steps as the trial's configuration accumulates."""

    def __init__(self, subject: Subject, spec: TrialSpec, reporter: Reporter) -> None:
        self._subject, self._spec, self._reporter = subject, spec, reporter
        self._fewest: int = spec.deepspeed["gradient_accumulation_steps"]
        self._first_differs = any(technique.first_differs for technique in techniques_of(spec))
        self._before = _NO_STEP  # the last untimed step
        self._on_new_lengths = list[float]()  # micro-steps of the candidate
        self._share_of_new = 0.0
        self._first_times = FirstTimes()
        self._began = time.perf_counter()

    def compile(self, candidate: CandidateSpec) -> tuple[float, list[float]]:
        """Two untimed steps: the first compiles. Returns how many seconds it took longer, and the losses of both."""
        seconds, losses = [], []
        for _ in range(2):
            began = time.perf_counter()
            losses += self._optimizer_step(candidate, "longest").losses
            seconds.append(time.perf_counter() - began)
        return max(0.0, seconds[0] - seconds[1]), losses

    def warm_up(self, candidate: CandidateSpec, num_steps: int) -> list[float]:
        """Run untimed optimizer steps on the longest batches, only one if the candidate is hopeless.

        Returns the losses of the micro-steps.
        """
        losses = []
        for _ in range(num_steps):
            self._began = time.perf_counter()
            step = self._optimizer_step(candidate, "longest")
            self._before = step
            losses += step.losses
            if self.is_hopeless(candidate):
                break
        return losses

    def settle_in(self, candidate: CandidateSpec) -> list[float]:
        """Untimed steps on usual batches, for whose shapes kernels may be compiled, and on new lengths of them.

        Returns the losses.
        """
        losses, self._on_new_lengths = [], list[float]()
        share = self._subject.share_of_new_lengths(candidate)
        (self._share_of_new,) = most_of_ranks([share], self._spec.device)  # the same on all ranks
        if self._share_of_new > 0:
            losses = self._meet_new_lengths(candidate)
        self._began = time.perf_counter()
        self._before = self._optimizer_step(candidate, "usual")
        return losses + self._before.losses

    def _meet_new_lengths(self, candidate: CandidateSpec) -> list[float]:
        losses = []
        for _ in range(_MOST_NEW):
            self._first_times.any_since()
            step = self._optimizer_step(candidate, "new")
            losses += step.losses
            if self.agree(self._first_times.any_since()):
                continue
            self._on_new_lengths.append(step.micro)
            if len(self._on_new_lengths) == _NEW_LENGTHS or step.micro > _LONG_MICRO_STEP:
                break
        return losses

    def _with_new_lengths(self, candidate: CandidateSpec, timings: Timings) -> Timings:
        """`timings` on usual batches of known lengths, with the part of a training's steps that meet new ones."""
        if len(self._on_new_lengths) < _NEW_LENGTHS:
            return timings
        known = [step.micro for step in timings.steps]
        is_seen = min(self._on_new_lengths) > max(known)  # else it is lost in the noise
        seconds = statistics.median(self._on_new_lengths) - statistics.median(known) if is_seen else 0.0
        new = NewLength(seconds, self._share_of_new)
        steps = [step.later(seconds * new.share, candidate) for step in timings.steps]
        return replace(timings, steps=steps, new_length=new)

    def is_hopeless(self, candidate: CandidateSpec) -> bool:
        """Whether the last untimed step was so slow that the candidate cannot win."""
        # Steps on the longest batches say little of the time of usual ones.
        return self._subject.is_even and candidate.loses(self._before.seconds, self._spec.steps.hopeless_margin)

    def needs_one_more(self, candidate: CandidateSpec) -> bool:
        """Whether an engine's first candidate needs another untimed step after the last one."""
        # The first micro-step of all may have compiled kernels.
        is_long = self._before.boundary * self._fewest >= self._spec.steps.long_seconds
        return not (self._spec.proof and is_long) and not self.is_hopeless(candidate)

    def time(self, candidate: CandidateSpec, policy: StepPolicy) -> Timings:
        """Time optimizer steps until the policy has enough. All ranks see the same times, so all stop together.

        RuntimeError if too many steps are skipped because of overflow.
        """
        timings, seconds = Timings(), list[float]()
        micro_steps = policy.micro_steps(candidate, self._fewest, self._before.accumulate)
        began = time.perf_counter()
        for _ in range(2 * policy.maximum):
            step = self._optimizer_step(candidate, "usual", micro_steps)
            timings.losses += step.losses
            if step.skipped:
                timings.skipped += 1  # after an overflow the optimizer is skipped, so the time does not count
                continue
            timings.steps.append(step)
            seconds.append(step.seconds)
            now = time.perf_counter()
            enough = policy.is_enough(candidate, seconds, self._before.seconds, now - began, now - self._began)
            if self.agree(enough or self._spec.is_late(time.monotonic())):
                return self._with_new_lengths(candidate, timings)
        raise RuntimeError(
            f"gradients overflowed or were NaN in all but {len(timings.steps)} of {2 * policy.maximum} optimizer "
            "steps, so these were skipped"
        )

    def _optimizer_step(self, candidate: CandidateSpec, kind: Kind, micro_steps: int | None = None) -> Step:
        micro_steps = micro_steps or self._fewest
        skipped_before = self._subject.skipped_steps
        self._subject.begin_step()
        seconds, losses = [], []
        for micro_step in range(1, micro_steps + 1):
            elapsed, loss = self._micro_step(candidate, kind, is_boundary=micro_step == micro_steps)
            seconds.append(elapsed)
            losses.append(loss)
        *before, boundary = most_of_ranks(seconds, self._spec.device)
        accumulate = accumulate_seconds(before, candidate.accumulation, first_differs=self._first_differs)
        whole = candidate.step_seconds(accumulate, boundary)
        return Step(accumulate, boundary, whole, losses, skipped=self._subject.skipped_steps > skipped_before)

    def _micro_step(self, candidate: CandidateSpec, kind: Kind, *, is_boundary: bool) -> tuple[float, float]:
        batch = self._subject.draw(candidate, kind)
        synchronize(self._spec.device)
        start = time.perf_counter()
        loss = self._subject.train_on(batch, is_boundary=is_boundary)
        synchronize(self._spec.device)
        elapsed = time.perf_counter() - start + self._subject.shared_seconds
        self._reporter.step(elapsed)
        return elapsed, float(loss)

    def agree(self, stop: bool) -> bool:
        """Whether any rank says stop: their clocks and limits may differ slightly."""
        return most_of_ranks([float(stop)], self._spec.device)[0] > 0


def accumulate_seconds(before: list[float], accumulation: int, *, first_differs: bool) -> float | None:
    """Seconds of a micro-step `before` the last one, which a step of `accumulation` has `accumulation` − 1 of.

    If the first differs, it counts once, and the others as often as there are in the step.
    """
    if not before:
        return None
    if not first_differs or len(before) == 1 or accumulation < 2:
        return statistics.median(before)
    first, *later = before
    return (first + (accumulation - 2) * statistics.median(later)) / (accumulation - 1)
