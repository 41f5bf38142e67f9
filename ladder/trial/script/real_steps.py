"""Timing a script's own loop: whole optimizer steps on its own data, its loader included."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from ladder.trial.measuring import measured
from ladder.trial.reporter import now
from ladder.trial.script.hold import Grip
from ladder.trial.steps import Step, Timings
from ladder.trial.subject import synchronize

_UNTIMED = 2
"""Optimizer steps before the timing. Chosen: the first makes Adam's states, the second reserves what they left."""


class RealSteps:
    """Collects what a proof reports; the script's loop calls it."""

    def __init__(self, grip: Grip) -> None:
        self._grip = grip
        (self._candidate,) = grip.spec.candidates
        self._timings = Timings()
        self._untimed = _UNTIMED
        self._losses: list[float] = []
        self._loading, self._waits, self._seconds = 0.0, list[float](), 0.0
        self._tokens, self._padded = 0, 0
        self._all_tokens, self._all_padded = 0.0, 0.0
        self._began = self._last = now()
        grip.reporter.candidate = self._candidate.key
        grip.reporter.phase("warmup")
        grip.gauge.reset()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """While the loop waits for its loader."""
        began = time.perf_counter()
        yield
        self._loading += time.perf_counter() - began

    def note_tokens(self, real: int, padded: int) -> None:
        """Of the batch that is trained next."""
        self._tokens += real
        self._padded += padded

    def note_loss(self, loss: torch.Tensor) -> None:
        self._losses.append(float(loss.detach()))
        self._grip.reporter.step(0.0)  # a sign of progress

    def end_step(self) -> bool:
        """An optimizer step is over; True once enough of them were timed."""
        synchronize(self._grip.spec.device)
        ended = now()
        seconds, tokens, padded, wait = self._over_ranks(ended - self._last)
        self._loading, self._tokens, self._padded = 0.0, 0, 0
        policy = self._grip.spec.steps
        if self._untimed:
            self._untimed -= 1
            if not self._untimed:
                if self._grip.gauge.settle():
                    self._untimed = 1
                self._grip.gauge.reset()
                self._grip.reporter.phase("measure")
                self._began = now()
            self._last = now()
            return False
        self._seconds += seconds
        seconds *= self._usual_tokens() / tokens if tokens else 1.0
        # The loop is not stopped between micro-steps: each has its share of the optimizer's.
        micro = seconds / self._candidate.accumulation
        accumulate = micro if self._candidate.accumulation > 1 else None
        self._timings.steps.append(Step(accumulate, micro, seconds, [], skipped=False))
        self._all_tokens += tokens
        self._all_padded += padded
        self._waits.append(wait)
        self._last = now()
        timed = [step.seconds for step in self._timings.steps]
        enough = policy.is_enough(self._candidate, timed, timed[0], ended - self._began, ended - self._began)
        flag = torch.tensor([float(enough)], device=self._grip.spec.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag[0] > 0)

    def _usual_tokens(self) -> float:
        facts = self._grip.script.facts
        assert facts is not None
        sequences = self._candidate.micro_batch * self._candidate.accumulation * self._grip.spec.world_size
        return facts.mean_tokens * sequences

    def _over_ranks(self, seconds: float) -> tuple[float, float, float, float]:
        """Of the slowest rank, of all ranks together, and again of the one that waited longest."""
        longest = torch.tensor([seconds, self._loading], dtype=torch.float64, device=self._grip.spec.device)
        whole = torch.tensor([self._tokens, self._padded], dtype=torch.float64, device=self._grip.spec.device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        dist.all_reduce(whole)
        return float(longest[0]), float(whole[0]), float(whole[1]), float(longest[1])

    def report(self) -> None:
        """Send what was measured, peaks of evaluation and save included."""
        ended = now()
        timings = replace(self._timings, losses=self._losses)
        reading = self._grip.gauge.read()
        event = measured(self._candidate, reading, timings, began=self._began, ended=ended, losses=self._losses)
        more = {
            "loader_share": sum(self._waits) / self._seconds,
            "padding": 1 - self._all_tokens / self._all_padded if self._all_padded else None,
        }
        self._grip.reporter.send(event.model_copy(update=more))
        self._grip.reporter.phase("teardown")
