"""Whether a script's own loop trained as the trial told it to: it may change its batch by itself."""

from __future__ import annotations

from typing import Any

from ladder.events.step_policy import CandidateSpec
from ladder.trial.script.samples import Samples, shape_of


class TrainsOtherwiseError(RuntimeError):
    """The script trained with other settings than the candidate's, so its measurement would be of something else."""

    is_sentence = True


class Seen:
    """What the loop of one rank trained on. Without `samples`, of a trainer that makes its batches itself."""

    def __init__(self, candidate: CandidateSpec, samples: Samples | None, world_size: int) -> None:
        self._candidate = candidate
        self._rows = candidate.micro_batch
        """Two for each sample where a pair is compared, and one for all where sequences are packed."""
        self._is_even = True
        """A micro-step has as many sequences whatever its samples; not if they are packed into as many as they need."""
        self._is_short = False
        """The data does not fill an optimizer step."""
        if samples is not None:
            self._rows = shape_of(samples.longest(candidate.micro_batch))[0]
            self._is_even = shape_of(samples.usual(candidate.micro_batch))[0] == self._rows
            total = len(samples.sizes) if samples.total is None else samples.total  # of a stream, what was read
            self._is_short = total < candidate.micro_batch * candidate.accumulation * world_size
        self._micro_steps, self.most_rows, self.accumulation = 0, 0, 0

    def note(self, batch: Any) -> None:
        """Of a micro-step."""
        self._micro_steps += 1
        self.most_rows = max(self.most_rows, shape_of(batch)[0])

    def drop_step(self) -> None:
        """The micro-steps since the last optimizer step belong to none."""
        self._micro_steps = 0

    def end_step(self) -> None:
        """An optimizer step is over."""
        self.accumulation = max(self.accumulation, self._micro_steps)
        self._micro_steps = 0

    def require(self, model: Any) -> None:
        """TrainsOtherwiseError, which names what differs from the candidate."""
        candidate = self._candidate
        sequences = self.most_rows * candidate.micro_batch / self._rows
        named: list[tuple[str, float | bool, float | bool, bool]] = [
            ("micro-steps in an optimizer step", self.accumulation, candidate.accumulation, not self._is_short),
        ]
        if self._is_even:
            named.append(("sequences in a micro-step", sequences, candidate.micro_batch, not self._is_short))
        # The second name is that of transformers before 5.23.
        names = ("is_activation_checkpointing", "is_gradient_checkpointing")
        checkpoints = next((getattr(model, name) for name in names if hasattr(model, name)), None)
        if checkpoints is not None:
            named.append(("gradient checkpointing", bool(checkpoints), candidate.checkpoint_every > 0, True))
        for what, is_now, told, is_sure in named:
            if is_now != told and (is_sure or is_now > told):
                raise TrainsOtherwiseError(
                    f"the script trains with {what}: {_shown(is_now)}, and the candidate has {_shown(told)}; "
                    "leave that setting of the script to ladder"
                )


def _shown(value: float | bool) -> str:
    return ("off", "on")[value] if isinstance(value, bool) else f"{value:g}"
