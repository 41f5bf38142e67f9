"""The bar chart of a report: memory by part."""

from __future__ import annotations

from ladder.events.outcome import Record
from ladder.report.charts import COLOURS, FAILED, Bar, Bars, Group, Part
from ladder.report.run_data import ReportedRun
from ladder.search.belief import believe
from ladder.search.space import failed_in_setup, measured
from ladder.units import GIB, format_bytes

_PREDICTED_PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "logits": "logits",
    "buffers": "buffers",
    "outside_torch": "outside PyTorch",
}
_PARTS = (
    *(Part(name=text, colour=colour) for text, colour in zip(_PREDICTED_PARTS.values(), COLOURS, strict=False)),
    Part(name="measured: allocated", colour="#595959"),
    Part(name="measured: reserved beyond that", colour="#9a9a9a"),
    Part(name="ran out, needs at least", colour=FAILED),
)
_OUTSIDE = len(_PREDICTED_PARTS) - 1
_SMALL_LIMIT = 10
"""For limits below this many GiB, one decimal is too coarse. Chosen."""
_MOST_GROUPS = 12
"""The most engines in a figure; the slowest are left out. Chosen."""


def memory_by_part(run: ReportedRun) -> Bars | None:
    """Memory of the answer and of each engine's best candidate: as predicted before any trial, and as measured."""
    chosen = {key: record for key, record in _furthest(run).items() if record.measurement or record.outcome.bytes_asked}
    if not chosen:
        return None
    prior, proofs = believe(run.space, ()), {entry.candidate_key: entry.proof for entry in run.entries}
    groups = []
    for key, record in chosen.items():
        parts = prior.outlook(run.space.by_key[key]).memory.parts
        predicted = tuple(getattr(parts, part) / GIB for part in _PREDICTED_PARTS)
        bars = [Bar(name="predicted", lengths=(*predicted, None, None, None)), _seen("trial", record, run)]
        if (proof := proofs.get(key)) is not None:
            bars.append(_seen("proof", proof, run))
        is_answer = run.answer is not None and key == run.answer.candidate_key
        label = f"{key} (the answer)" if is_answer else key
        groups.append(Group(label=label, bars=tuple(bars), is_answer=is_answer))
    limit = run.space.memory_limit / GIB
    return Bars(
        title=f"GiB of the fullest {run.rank_word}",
        unit="GiB",
        digits=",.1f" if limit >= _SMALL_LIMIT else ",.2f",
        parts=_PARTS,
        groups=tuple(groups),
        limit=limit,
        limit_label=f"limit: {format_bytes(run.space.memory_limit)}",
    )


def needed(record: Record, run: ReportedRun) -> float:
    """GiB that a candidate which ran out of memory would have needed at least."""
    missing = max(0, (record.outcome.bytes_asked or 0) - (record.outcome.bytes_free or 0))
    return (run.space.memory_limit + missing) / GIB


def _furthest(run: ReportedRun) -> dict[str, Record]:
    """The answer's trial, then by engine its fastest candidate that fits, or else one that ran out while training.

    The fastest engines come first, up to `_MOST_GROUPS`.
    """
    tried = measured(run.records)
    chosen: list[Record] = []
    for engine in run.space.engines:
        own = [tried[each.key] for each in run.space.of_engine(engine) if each.key in tried]
        fits = [record for record in own if record.measurement]
        failed = [record for record in own if record.outcome.kind == "gpu_oom" and not failed_in_setup(record.outcome)]
        best = max(fits, key=lambda record: record.tokens_per_second or 0.0) if fits else next(iter(failed), None)
        if best is not None:
            chosen.append(best)
    chosen.sort(key=lambda record: -(record.tokens_per_second or 0.0))
    if run.best is not None:
        chosen.insert(0, tried.get(run.best.candidate_key, run.best))
    return {record.candidate_key: record for record in chosen[:_MOST_GROUPS]}


def _seen(name: str, record: Record, run: ReportedRun) -> Bar:
    """The bar of measured memory of `record`, or of what it would have needed."""
    seen, lengths = record.measurement, [0.0] * len(_PARTS)
    if seen is None:
        lengths[-1] = needed(record, run)
    else:
        lengths[-3] = seen.peak_allocated / GIB
        lengths[-2] = max(0, seen.peak_reserved - seen.peak_allocated) / GIB
        lengths[_OUTSIDE] = max(0, seen.peak_device - seen.peak_reserved) / GIB
    return Bar(name=name, lengths=tuple(length or None for length in lengths))
