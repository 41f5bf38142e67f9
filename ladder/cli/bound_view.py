"""What `ladder explain --bound` prints."""

from __future__ import annotations

from typing import Any

from ladder.events.outcome import Record
from ladder.search.bound import Bound


def lines(best: Record, limit: Bound, device: str) -> list[str]:
    """The answer's share of the limit, and a line for each part of its step."""
    speed, where = best.tokens_per_second or 0.0, "GPU" if device == "cuda" else "CPU rank"
    rate = limit.matrix_flops / 1e12
    rows = [
        f"{best.candidate_key} trains {speed:,.0f} tokens/s: {limit.share:.0%} of the {limit.tokens_per_second:,.0f} "
        "that matrix products alone would allow.",
        f"The proof measured {rate:,.3g} TFLOP/s in products of the model's sizes on each {where}.",
        f"Its optimizer step takes {limit.step_seconds:.3g} s:",
    ]
    for part in sorted(limit.parts, key=lambda part: -part.seconds):
        rows.append(f"  {part.seconds / limit.step_seconds:4.0%}  {part.seconds:7.3g} s  {part.meaning}")
    return rows


def as_document(best: Record, limit: Bound) -> dict[str, Any]:
    """The same for JSON."""
    return {
        "answer": best.candidate_key,
        "tokens_per_second": best.tokens_per_second,
        "bound_tokens_per_second": round(limit.tokens_per_second, 1),
        "share": round(limit.share, 4),
        "matrix_flops": limit.matrix_flops,
        "step_seconds": limit.step_seconds,
        "parts": {part.short: part.seconds for part in limit.parts},
    }
