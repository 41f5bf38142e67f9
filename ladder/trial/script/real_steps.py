"""Timing a script's own loop: whole optimizer steps on its own data, its loader included."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ladder.trial.first_times import FirstTimes
from ladder.trial.measuring import measured
from ladder.trial.reporter import now
from ladder.trial.script.hold import Grip
from ladder.trial.script.samples import Samples, count_tokens
from ladder.trial.script.seen import Seen
from ladder.trial.script.usual import Window, may_be_calm_soon, on_usual_batches, that_count
from ladder.trial.steps import Step, Timings
from ladder.trial.subject import most_of_ranks, synchronize

_WINDOW_SECONDS = 0.5
"""Of steps that are timed as one. Chosen: many times what it takes to bring ranks together."""
_UNTIMED, _UNTIMED_SECONDS = 3, 2.0
"""Optimizer steps, and their seconds at least, before the timing. Chosen: the first makes Adam's states, the next
reserve what they left; short steps of a small model settle after a second or two (measured on an H200: opt-125m's fell
from 0.11 to 0.06 s)."""
_ALIKE, _SETTLING_SECONDS = 1.25, 45.0
"""Steps that generate are timed once three in a row are so much alike, or after so many seconds. Chosen: each new
length of a completion makes its kernels ready, so the first steps take up to three times as long as later ones
(measured on an H200), and an answer should not wait for minutes."""


class RealSteps:
    """Collects what a proof reports; the script's loop calls it.

    Without `samples`, of a trainer that makes its batches itself: nothing is known of usual ones. Optimizer steps
    repeat themselves after `cycle` of them, of which one may generate for all.
    """

    def __init__(self, grip: Grip, samples: Samples | None, cycle: int = 1) -> None:
        self._grip = grip
        (self._candidate,) = grip.spec.candidates
        sequences = self._candidate.accumulation * grip.spec.world_size
        self._usual = samples.padded_tokens(self._candidate.micro_batch) * sequences if samples is not None else None
        self._seen = Seen(self._candidate, samples, grip.spec.world_size)
        self._losses = list[torch.Tensor]()
        self._windows = list[Window]()
        self._first_times = FirstTimes()
        self._now, self._untimed = _Now(), list[float]()
        self._is_timing = False
        self._window = self._cycle = cycle
        self._began = self._last = now()
        grip.reporter.candidate = self._candidate.key
        grip.reporter.phase("warmup")
        grip.gauge.reset()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """While the loop waits for its loader."""
        began = time.perf_counter()
        yield
        self._now.loading += time.perf_counter() - began

    def note_batch(self, batch: Any) -> None:
        """It is trained next."""
        self._seen.note(batch)
        real, padded = count_tokens(batch)
        self._now.tokens += real
        self._now.padded += padded

    def note_loss(self, loss: torch.Tensor) -> None:
        """Of the micro-step that was trained; a sign of progress too."""
        self._losses.append(loss.detach())  # read at the end: reading waits for the GPU
        self._grip.reporter.step(0.0)

    def drop_step(self) -> None:
        """The epoch ended within an optimizer step."""
        self._seen.drop_step()

    def end_step(self) -> bool:
        """An optimizer step is over; True once enough of them were timed.

        The ranks are brought together, and the GPU waited for, only every second or so: a script's own loop prepares
        the next batch while the GPU still works on this one.
        """
        self._now.steps += 1
        self._seen.end_step()
        if self._now.steps < self._window:
            return False
        synchronize(self._grip.spec.device)
        ended = now()
        window = self._over_ranks(ended - self._last - self._grip.saves.taken())
        self._now, self._last = _Now(), ended
        if self._is_warming(ended, window.whole_seconds):
            self._last = now()
            return False
        self._windows.append(window)
        counted = self._that_count
        each, timed = [one.seconds for one in counted], sum(one.whole_seconds for one in counted)
        policy = self._grip.spec.steps
        enough = bool(counted) and policy.is_enough(self._candidate, each, each[0], timed, timed)
        if self._usual is not None and may_be_calm_soon(counted, policy.seconds):
            enough = False
        return self._any_rank(enough)

    @property
    def are_measured(self) -> bool:
        """As many steps were made as a proof has to have, and some count; the same on all ranks."""
        made = sum(window.steps for window in self._windows)
        return bool(self._that_count) and made >= self._grip.spec.steps.minimum

    @property
    def _that_count(self) -> list[Window]:
        return that_count(self._windows, are_alike=self._usual is not None)

    def _is_warming(self, ended: float, seconds: float) -> bool:
        """Whether the step that `ended` came before the timing, which may begin with the next."""
        if self._is_timing:
            return False
        self._untimed.append(seconds)
        if self._any_rank(self._has_settled(ended - self._began)):
            self._is_timing = not self._any_rank(self._grip.gauge.settle())  # a narrower limit: once more
            self._untimed.clear()
            self._grip.gauge.reset()
            self._first_times.any_since()  # the gauge has given memory back
            self._grip.reporter.phase("measure")
            self._began = now()
            if self._is_timing:  # all ranks have the seconds of the slowest
                self._window = self._cycle * max(1, math.ceil(_WINDOW_SECONDS / seconds))
        return True

    def _has_settled(self, passed: float) -> bool:
        last = self._untimed[-_UNTIMED:]
        if len(last) < _UNTIMED or passed < _UNTIMED_SECONDS:
            return False
        return self._usual is not None or max(last) <= _ALIKE * min(last) or passed >= _SETTLING_SECONDS

    def _any_rank(self, says: bool) -> bool:
        return most_of_ranks([float(says)], self._grip.spec.device)[0] > 0

    def _over_ranks(self, seconds: float) -> Window:
        """The steps since ranks came together last, which took this rank `seconds`."""
        kind, device, mine = torch.float64, self._grip.spec.device, self._now
        firsts = float(self._first_times.any_since())
        longest = torch.tensor([seconds, mine.loading, firsts], dtype=kind, device=device)
        whole = torch.tensor([mine.tokens, mine.padded], dtype=kind, device=device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        dist.all_reduce(whole)
        slowest, wait, firsts, tokens, padded = (*longest.tolist(), *whole.tolist())
        steps = mine.steps
        return Window(steps, slowest / steps, wait / steps, tokens / steps, padded / steps, firsts > 0)

    def report(self, model: Any, clipping: float | None = None) -> None:
        """Send what was measured, peaks of evaluation and save included, and the loop's own `clipping` of gradients.

        TrainsOtherwiseError if the script did not train `model` as it was told.
        """
        with self._grip.reporter.during("measure"):
            self._seen.require(model)
        ended, accumulation = now(), self._candidate.accumulation
        losses, windows = [float(loss) for loss in self._losses], self._that_count
        timings = Timings(losses=losses)
        usual = [each.seconds for each in windows]
        if self._usual is not None:
            usual = on_usual_batches(usual, [each.padded for each in windows], self._usual)
        for window, seconds in zip(windows, usual, strict=True):
            # The loop is not stopped between micro-steps: each has its share of the optimizer's.
            micro = seconds / accumulation
            step = Step(micro if accumulation > 1 else None, micro, seconds, [], skipped=False)
            timings.steps += [step] * window.steps
        reading = self._grip.gauge.read()
        event = measured(self._candidate, reading, timings, began=self._began, ended=ended, losses=losses)
        padded = sum(each.padded for each in windows)
        event = replace(
            event,
            loader_share=sum(each.wait for each in windows) / sum(each.seconds for each in windows),
            gradient_clipping=clipping,
            padding=1 - sum(each.tokens for each in windows) / padded if padded else None,
        )
        self._grip.reporter.send(event)
        self._grip.reporter.phase("teardown")


@dataclass
class _Now:
    """The optimizer steps since ranks came together last."""

    steps: int = 0
    loading: float = 0.0
    tokens: int = 0
    padded: int = 0
