"""What a verification found, beside what the file promises."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ladder.errors import MoreMemoryThanPromisedError, NothingFitsError, SlowerThanPromisedError, UsageError
from ladder.events.outcome import Record
from ladder.units import MIB, format_bytes, in_words

_MORE = {"cuda": (0.01, 64 * MIB), "cpu": (0.25, 512 * MIB)}
"""By device: the share of the promise, and the least bytes, by which a peak may be above it. Measured on H200s: tensors
of a real training took at most 0.01 % more than in its proof, and the allocator's cache up to 0.8 % more. Chosen: a
hundred times the former, and no less than cuBLAS's workspace, which differs between GPUs. On a CPU the peak is the data
segment of the whole process, in which torch keeps what it prepares for each length of a batch: hundreds of MiB."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What the file promises and what was measured. Bytes are of the fullest GPU, tokens/s of all GPUs."""

    path: Path
    candidate_key: str
    record: Record
    promised_tokens_per_second: float
    promised_range: tuple[float, float] | None = None
    """The lowest and the highest tokens/s of a training, if the file promises no single figure."""
    promised_device_bytes: int
    promised_allocated_bytes: int
    """In tensors, at its peak; of a script with the longest of its samples."""
    promised_reserved_bytes: int
    """The same with the cache of torch's allocator."""
    memory_limit: int
    device: Literal["cuda", "cpu"]
    tolerance: float
    """Of the speed."""
    seconds: float
    has_script: bool = False
    """The user's own was verified."""

    @property
    def fits(self) -> bool:
        return self.record.outcome.kind == "fits"

    @property
    def slower(self) -> float | None:
        """How much slower it is, as a fraction of the promise, of a range its lower end; negative if it is faster, None
        if it does not fit."""
        speed, (lowest, *_) = self.record.tokens_per_second, self._promised_speeds
        return None if speed is None else 1 - speed / lowest

    @property
    def _promised_speeds(self) -> tuple[float, ...]:
        return self.promised_range or (self.promised_tokens_per_second,)

    @property
    def holds(self) -> bool:
        return self.slower is not None and self.slower <= self.tolerance and not self.more_bytes

    @property
    def more_bytes(self) -> int:
        """Allocated above the promise; 0 within the tolerance of memory, whatever the cache holds."""
        seen = self.record.measurement
        return self._beyond(seen.peak_allocated, self.promised_allocated_bytes) if seen is not None else 0

    @property
    def caches_more(self) -> str:
        """A sentence, without its full stop, if only the allocator's cache is larger than promised; otherwise empty."""
        seen = self.record.measurement
        if seen is None or self.more_bytes or not self._beyond(seen.peak_reserved, self.promised_reserved_bytes):
            return ""
        promised = format_bytes(self.promised_reserved_bytes)
        return (
            f"torch's allocator reserved {format_bytes(seen.peak_reserved)} ({promised} promised); the tensors took no "
            "more, so it caches what the GPU has room for"
        )

    def _beyond(self, seen: int, promised: int) -> int:
        fraction, least = _MORE[self.device]
        return seen - promised if seen - promised > max(fraction * promised, least) else 0

    def sentence(self) -> str:
        """Measured and promised speed and memory; or how the proof failed."""
        seen, speed = self.record.measurement, self.record.tokens_per_second
        if seen is None or speed is None:
            return self.record.outcome.sentence
        return (
            f"{speed:,.0f} tokens/s ({in_words(self._promised_speeds)} promised), "
            f"{format_bytes(seen.peak_device)} of {format_bytes(self.memory_limit)} per GPU "
            f"({format_bytes(self.promised_device_bytes)} promised), {seen.num_steps} optimizer steps"
        )

    def require(self) -> None:
        """UsageError if a user's script itself failed, NothingFitsError if it no longer fits,
        MoreMemoryThanPromisedError if its tensors take more than promised, SlowerThanPromisedError if it is slower
        than the tolerance allows."""
        if self.has_script and self.record.outcome.kind == "crash":
            raise UsageError(
                f"{str(self.path)!r} could not be verified, because the script failed: {self.record.outcome.sentence}."
            )
        if not self.fits:
            raise NothingFitsError(
                f"{str(self.path)!r} no longer fits here: {self.record.outcome.sentence}; run `ladder tune` again."
            )
        if self.more_bytes:
            promised = self.promised_allocated_bytes
            raise MoreMemoryThanPromisedError(
                f"{str(self.path)!r} still fits, but takes {format_bytes(promised + self.more_bytes)} where it "
                f"promises {format_bytes(promised)}; see what changed in the script or its data, or run `ladder tune` "
                "again."
            )
        if not self.holds:
            raise SlowerThanPromisedError(
                f"{str(self.path)!r} still fits, but is {self.slower:.1%} slower than it promises (tolerance "
                f"{self.tolerance:.0%}); see what else uses the machine, or run `ladder tune` again."
            )
