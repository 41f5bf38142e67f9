"""Runs and times optimizer steps of one candidate after another in the same engine."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ladder.events.protocol import CandidateSpec, StepPolicy, TrialSpec
from ladder.trial.backends import Training
from ladder.trial.model import make_batch
from ladder.trial.reporter import Reporter
from ladder.trial.techniques import techniques_of


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


@dataclass
class Timings:
    """All timed optimizer steps of a candidate."""

    steps: list[Step] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    skipped: int = 0

    @property
    def accumulate(self) -> list[float]:
        """Seconds of a micro-step without the optimizer, by step; empty without accumulation."""
        return [step.accumulate for step in self.steps if step.accumulate is not None]

    @property
    def boundary(self) -> list[float]:
        """Seconds of the micro-step with the optimizer, by step."""
        return [step.boundary for step in self.steps]


class Stepper:
    """Runs whole optimizer steps of `accumulation` micro-steps each."""

    def __init__(self, training: Training, spec: TrialSpec, reporter: Reporter, vocab_size: int) -> None:
        self._training, self._spec = training, spec
        self._reporter, self._vocab_size = reporter, vocab_size
        self._accumulation: int = spec.deepspeed["gradient_accumulation_steps"]
        # Seeded by rank and not by candidate: every candidate of every engine sees the same tokens.
        same_data = spec.shares_sequences or spec.same_data
        self._seed = spec.seed * 1000 + (0 if same_data else dist.get_rank())
        self._techniques = techniques_of(spec)
        self._generator = torch.Generator().manual_seed(self._seed)
        self._flag = torch.zeros(1, device=spec.device)
        self._before = Step(None, math.inf, math.inf, [], skipped=False)  # the last untimed step
        self._began = time.perf_counter()

    def warm_up(self, candidate: CandidateSpec, num_steps: int) -> list[float]:
        """Run untimed optimizer steps, only one if the candidate is hopeless; returns the losses of the micro-steps."""
        losses = []
        for _ in range(num_steps):
            self._began = time.perf_counter()
            self._before = self._optimizer_step(candidate)
            losses += self._before.losses
            if self.is_hopeless(candidate):
                break
        return losses

    def is_hopeless(self, candidate: CandidateSpec) -> bool:
        """Whether the last untimed step was so slow that the candidate cannot win."""
        return candidate.loses(self._before.seconds, self._spec.steps.hopeless_margin)

    def time(self, candidate: CandidateSpec, policy: StepPolicy) -> Timings:
        """Time optimizer steps until the policy has enough. All ranks see the same times, so all stop together.

        RuntimeError if too many steps are skipped because of overflow.
        """
        timings, seconds = Timings(), list[float]()
        began = time.perf_counter()
        for _ in range(2 * policy.maximum):
            step = self._optimizer_step(candidate)
            timings.losses += step.losses
            if step.skipped:
                timings.skipped += 1  # after an overflow the optimizer is skipped, so the time does not count
                continue
            timings.steps.append(step)
            seconds.append(step.seconds)
            now = time.perf_counter()
            enough = policy.is_enough(candidate, seconds, self._before.seconds, now - began, now - self._began)
            if self.agree(enough):
                return timings
        raise RuntimeError(
            f"gradients overflowed or were NaN in all but {len(timings.steps)} of {2 * policy.maximum} optimizer "
            "steps, so these were skipped"
        )

    def evaluate(self, micro_batch: int) -> None:
        """Run one evaluation pass with the candidate's micro-batch."""
        self._training.eval()
        with torch.no_grad(), self._reporter.during("evaluation"):
            batch = make_batch(self._spec, self._vocab_size, micro_batch, self._generator)
            arguments: dict[str, Any] = {}
            for technique in self._techniques:
                batch = technique.evaluation_batch(batch, self._spec)
                arguments |= technique.evaluation_arguments
            self._training(**batch, **arguments)
        self._training.train()
        self._sync()

    def gather(self, save_folder: str | None) -> None:
        """Gather the full 16-bit weights on rank 0's host as a save does; write them only if `save_folder` is given."""
        with self._reporter.during("gather"):
            self._training.gather(save_folder)
            self._sync()

    def _optimizer_step(self, candidate: CandidateSpec) -> Step:
        skipped_before = self._training.skipped_steps
        if self._spec.parity:
            self._generator.manual_seed(self._seed)
        seconds, losses = [], []
        for _ in range(self._accumulation):
            elapsed, loss = self._micro_step(candidate)
            seconds.append(elapsed)
            losses.append(loss)
        *before, boundary = self._slowest(seconds)
        accumulate = statistics.median(before) if before else None
        whole = candidate.step_seconds(accumulate, boundary)
        return Step(accumulate, boundary, whole, losses, skipped=self._training.skipped_steps > skipped_before)

    def _micro_step(self, candidate: CandidateSpec) -> tuple[float, float]:
        batch = make_batch(self._spec, self._vocab_size, candidate.micro_batch, self._generator)
        for technique in self._techniques:
            batch = technique.own_batch(batch)
        self._sync()
        start = time.perf_counter()
        with self._reporter.during("forward"):
            loss = self._training(**batch).loss
            for technique in self._techniques:
                loss = technique.whole_loss(loss, batch)
        with self._reporter.during("backward"):
            self._training.backward(loss)
        with self._reporter.during("step"):
            self._training.step()
            self._sync()
        elapsed = time.perf_counter() - start
        self._reporter.step(elapsed)
        return elapsed, float(loss.detach())

    def _sync(self) -> None:
        if self._spec.device == "cuda":
            torch.cuda.synchronize()

    def _slowest(self, seconds: list[float]) -> list[float]:
        times = torch.tensor(seconds, device=self._spec.device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return [float(second) for second in times]

    def agree(self, stop: bool) -> bool:
        """Whether any rank says stop: their clocks and limits may differ slightly."""
        self._flag.fill_(float(stop))
        dist.all_reduce(self._flag, op=dist.ReduceOp.MAX)
        return bool(self._flag[0] > 0)
