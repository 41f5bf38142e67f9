"""What a rank reports, written by hand."""

from __future__ import annotations

from typing import Any

from ladder.events.protocol import MeasuredEvent


def measured_event(candidate: str, **changes: Any) -> MeasuredEvent:
    """A candidate that takes a byte of everything, and a second for a step."""
    sizes = ("peak_allocated", "peak_reserved", "peak_device", "peak_host")
    settings: dict[str, Any] = {
        "t": 1.0,
        "began": 0.0,
        "accumulate_seconds": [],
        "boundary_seconds": [1.0],
        "skipped_steps": 0,
        "outside_torch": 0,
        "alloc_retries": 0,
        "losses": [],
        **dict.fromkeys(sizes, 1),
    }
    return MeasuredEvent(candidate=candidate, **settings | changes)
