"""The figures of speed: against memory, with the recipe's first fit; and in the order of the trials."""

from __future__ import annotations

from collections.abc import Sequence

from ladder.events.outcome import Measurement
from ladder.report.charts import ANSWER, COLOURS, FAILED, GREY, RECIPE, Point, Scatter, Series, Shape
from ladder.report.figures import needed
from ladder.report.first_fit import first_fit
from ladder.report.run_data import ReportedRun
from ladder.search.ledger import Entry
from ladder.units import GIB, format_bytes

_BEYOND = 1.35
"""The axis ends at this multiple of the limit; points beyond it are drawn at its end or left out. Chosen."""
_MOST_PREDICTED = 200
"""The most predicted candidates; more rings would only hide each other. Chosen."""


def speed_against_memory(run: ReportedRun) -> Scatter | None:
    """The figure; None if there is nothing to show near the limit."""
    limit = run.space.memory_limit / GIB
    most = _BEYOND * limit
    series = [*_fitting(run), *_failed(run, most), *_predicted(run, most), *_recipe(run, most), *_proofs(run)]
    if not series:
        return None
    return Scatter(
        x_title=f"memory of the fullest {run.rank_word}, GiB",
        y_title="tokens/s",
        x_most=most,
        series=tuple(series),
        limit=limit,
        limit_label=f"limit: {format_bytes(run.space.memory_limit)}",
    )


def speed_over_time(run: ReportedRun) -> Scatter | None:
    """Trials, failures and proofs in the order in which they ended, and the fastest that was proven so far."""
    ended, passed = dict[str, float](), 0.0
    for trial in sorted(run.trial_seconds):
        passed += sum(run.trial_seconds[trial].values())
        ended[trial] = passed
    points: dict[bool, list[Point]] = {True: [], False: []}
    failed, line = [], list[tuple[float, float]]()
    for record in run.records:
        seen, speed, at = record.measurement, record.tokens_per_second or 0.0, ended.get(record.trial)
        if at is None or record.purpose == "probe":
            continue
        is_proof = record.purpose == "proof"
        what = f"{'proof' if is_proof else 'trial'} {record.trial}, {record.candidate_key}"
        if seen is None or not speed:
            failed.append(Point(x=at, y=0.0, text=f"{what}: {record.outcome.sentence}"))
            continue
        low, high, said = _spread(speed, seen)
        points[is_proof].append(Point(x=at, y=speed, low=low, high=high, text=f"{what}: {said}"))
        if is_proof and speed > (best := line[-1][1] if line else 0.0):
            line += [(at, best), (at, speed)] if line else [(at, speed)]
    if not points[False]:
        return None
    return Scatter(
        x_title="seconds of trials",
        y_title="tokens/s",
        x_most=1.05 * passed,
        series=(
            *_series("trial", COLOURS[0], "circle", points[False]),
            *_series("failed", FAILED, "cross", failed),
            *_series("proof", ANSWER, "diamond", points[True]),
        ),
        line=(*line, (passed, line[-1][1])) if line else (),
        line_label="The fastest that was proven so far.",
    )


def _fitting(run: ReportedRun) -> list[Series]:
    """One series per rung; the answer has its own shape."""
    rungs: dict[str, list[Point]] = {}
    answer: list[Point] = []
    for entry in run.entries:
        if (point := _trial(entry)) is not None:
            (answer if entry.status == "answer" else rungs.setdefault(entry.rung, [])).append(point)
    found = [
        Series(name=name, colour=COLOURS[place % len(COLOURS)], shape="circle", points=tuple(points))
        for place, (name, points) in enumerate(rungs.items())
    ]
    return [*found, *_series("the answer, in its trial", ANSWER, "star", answer)]


def _trial(entry: Entry) -> Point | None:
    record = entry.record
    if record is None or record.measurement is None or not record.tokens_per_second:
        return None
    seen = record.measurement
    low, high, said = _spread(record.tokens_per_second, seen)
    return Point(
        x=seen.peak_device / GIB,
        y=record.tokens_per_second,
        low=low,
        high=high,
        text=f"{entry.candidate_key}: {said}, {seen.peak_device / GIB:.2f} GiB; {entry.why}",
        label="the answer" if entry.status == "answer" else "",
    )


def _spread(speed: float, seen: Measurement) -> tuple[float, float, str]:
    """The ends of what was measured as `speed`, in tokens/s, and both in words."""
    return speed * (1 - seen.spread), speed * (1 + seen.spread), f"{speed:,.0f} tokens/s ± {seen.spread:.1%}"


def _proofs(run: ReportedRun) -> list[Series]:
    points = []
    for entry in run.entries:
        proof = entry.proof
        if proof is None or proof.measurement is None or not proof.tokens_per_second:
            continue
        trial, seen = _trial(entry), proof.measurement
        low, high, said = _spread(proof.tokens_per_second, seen)
        points.append(
            Point(
                x=seen.peak_device / GIB,
                y=proof.tokens_per_second,
                low=low,
                high=high,
                text=f"proof of {entry.candidate_key}: {said}, {seen.peak_device / GIB:.2f} GiB",
                tied_to=(trial.x, trial.y) if trial else None,
            )
        )
    return _series("proof, tied to its trial", ANSWER, "diamond", points)


def _failed(run: ReportedRun, most: float) -> list[Series]:
    """Candidates that ran out, at the memory that they would have needed at least; none has a speed."""
    points = []
    for entry in run.entries:
        if entry.record is None or entry.record.outcome.kind != "gpu_oom":
            continue
        at_least = needed(entry.record, run)
        text = f"{entry.candidate_key}: needs at least {at_least:.2f} GiB; {entry.why}"
        points.append(Point(x=min(most, at_least), y=0.0, text=text))
    return _series("ran out of memory", FAILED, "cross", points)


def _predicted(run: ReportedRun, most: float) -> list[Series]:
    known = [(entry, entry.predicted) for entry in run.entries if entry.predicted]
    in_sight = [(entry, seen) for entry, seen in known if seen.peak / GIB < most]
    in_sight.sort(key=lambda pair: -pair[1].tokens_per_second)
    points = [
        Point(
            x=seen.peak / GIB,
            y=seen.tokens_per_second,
            low=seen.low,
            high=seen.high,
            text=f"{entry.candidate_key}: predicted {seen.tokens_per_second:,.0f} tokens/s "
            f"({seen.low:,.0f} to {seen.high:,.0f}), {seen.peak / GIB:.2f} GiB",
        )
        for entry, seen in in_sight[:_MOST_PREDICTED]
    ]
    return _series("predicted, not tried", GREY, "ring", points)


def _recipe(run: ReportedRun, most: float) -> list[Series]:
    found = first_fit(run.space, run.records)
    if found is None:
        return []
    how = "in trial " + found.trial if found.trial else "predicted"
    point = Point(
        x=min(most, found.peak / GIB),
        y=found.tokens_per_second,
        low=found.low,
        high=found.high,
        text=f"the documented recipe's first fit, {found.candidate.key}: {found.figure}",
        label=f"the recipe's first fit, {how}",
    )
    return _series(f"the recipe's first fit, {how}", RECIPE, "square", [point])


def _series(name: str, colour: str, shape: Shape, points: Sequence[Point]) -> list[Series]:
    """A series of `points`; an empty list if there are none."""
    return [Series(name=name, colour=colour, shape=shape, points=tuple(points))] if points else []
