"""What to try next, and why: pure functions from the space and the history to a decision."""

from __future__ import annotations

from collections.abc import Sequence

from ladder.backends.registry import is_main
from ladder.candidates import Candidate
from ladder.events.outcome import Record
from ladder.search.auto import auto
from ladder.search.decisions import Decision, Measure, Prove, Stop, Strategy
from ladder.search.knobs import less_noise
from ladder.search.second_chance import second_chance
from ladder.search.space import Space, measured, proven, ranking, ruled_out
from ladder.techniques.keys import engine_in


def exhaustive(space: Space, records: Sequence[Record]) -> Measure | Stop:
    """Try every candidate of every engine, except those that an earlier failure rules out.

    A candidate that ran out because of fragmentation late in its trial is tried again if it might be the answer.
    """
    tried = measured(records)
    for engine in space.engines:
        left = tuple(
            candidate
            for candidate in space.of_engine(engine)
            if candidate.key not in tried and ruled_out(candidate, space, records) is None
        )
        if left:
            alike = tuple(candidate for candidate in left if candidate.setup == left[0].setup)
            return Measure(engine, alike, f"{len(left)} candidates of {engine.key} are not tried yet")
    return second_chance(space, records) or Stop("every candidate was measured or ruled out by a failure")


def documented_steps(space: Space) -> list[Candidate]:
    """The steps of the documented ladder: micro-batch 1, gradient checkpointing first, then rung after rung."""
    smallest = space.micro_batches[0]
    engines = [engine for engine in space.engines if engine.rung.documented and not engine.techniques]
    steps = []
    for index, engine in enumerate(engines):
        for candidate in space.of_engine(engine):
            every = candidate.checkpoint_every
            if (
                candidate.micro_batch == smallest
                and not candidate.offload_activations
                and (every == 1 or (every == 0 and index == 0))
            ):
                steps.append(candidate)
    return sorted(steps, key=lambda step: (engines.index(step.engine), step.gradient_checkpointing))


def walk(space: Space, records: Sequence[Record]) -> Measure | Stop:
    """Go down the documented ladder until something fits."""
    tried = measured(records)
    for step in documented_steps(space):
        if step.key not in tried:
            return Measure(step.engine, (step,), "the next step of the documented ladder")
        if tried[step.key].outcome.kind == "fits":
            return Stop(f"{step.key} is the first step of the documented ladder that fits")
    return Stop("no step of the documented ladder fits")


def reverse(space: Space, records: Sequence[Record]) -> Measure | Stop:
    """Go up the documented ladder from the step that needs least memory, until something does not fit."""
    tried, fits = measured(records), False
    for step in reversed(documented_steps(space)):
        if step.key not in tried:
            return Measure(step.engine, (step,), "the next step up from the one that needs least memory")
        if tried[step.key].outcome.kind == "fits":
            fits = True
        elif fits:
            return Stop(f"{step.key} is the first step, going up, that does not fit")
    return Stop(f"{'every' if fits else 'no'} step of the documented ladder fits")


def bisect(space: Space, records: Sequence[Record]) -> Measure | Stop:
    """Find the first step of the documented ladder that fits by bisection, assuming that later steps need less."""
    steps, tried = documented_steps(space), measured(records)
    low, high = 0, len(steps)  # the first that fits lies in steps[low:high + 1]
    while low < high:
        middle = (low + high) // 2
        step = steps[middle]
        if step.key not in tried:
            return Measure(step.engine, (step,), f"the middle of the {high - low} steps left of the documented ladder")
        if tried[step.key].outcome.kind == "fits":
            high = middle
        else:
            low = middle + 1
    return Stop(
        "no step fits" if low == len(steps) else f"{steps[low].key} is where the documented ladder begins to fit"
    )


__all__ = [
    "ALONG_THE_LADDER",
    "STRATEGIES",
    "Decision",
    "Measure",
    "Prove",
    "Stop",
    "Strategy",
    "answer",
    "auto",
    "bisect",
    "documented_steps",
    "exhaustive",
    "proof",
    "reverse",
    "walk",
]

STRATEGIES: dict[str, Strategy] = {
    "auto": auto,
    "exhaustive": exhaustive,
    "walk": walk,
    "reverse": reverse,
    "bisect": bisect,
}

ALONG_THE_LADDER = frozenset({"walk", "reverse", "bisect"})
"""The strategies that only use the documented ladder."""

_PROOF_TOLERANCE = 0.02
"""If a proof is slower than the next candidate's trial by more than this, the next one is proven too. Chosen: the
default of --tolerance."""
_UNSTEADY = 0.93
"""What counts of a trial in which the allocator emptied its cache. Measured: the proofs of five such candidates reached
0.86 to 1.11 of their trials (benchmarks/results/runs). Chosen: a little below the average of 0.97."""
_MAX_EXTRA_PROOFS = 2
"""Chosen: each takes as long as the first, and later candidates were slower in their trials."""
_DISTURBED = 0.8
"""A proof that reaches less of its trial's speed is made once more. Measured: of 109 proofs of models on GPUs
(benchmarks/results/compare and runs), two did: 0.50 and 0.56, both on one host. The next reached 0.84."""


def proof(space: Space, records: Sequence[Record]) -> Prove | Stop:
    """Which candidate to prove next: the fastest that fits, then others if its proof made them look faster."""
    records = less_noise(space, records)
    proofs, tried = proven(records), measured(records)
    best_proven = max((record.tokens_per_second or 0.0 for record in proofs.values()), default=0.0)
    for record in sorted(ranking(records), key=_expected_in_proof, reverse=True):
        speed = _expected_in_proof(record)
        worth_it = speed > best_proven * (1 + _PROOF_TOLERANCE)
        if record.candidate_key in proofs:
            if worth_it and _is_disturbed(space, records, record):
                return Prove(space.by_key[record.candidate_key], "its proof was far slower than its trial")
            continue
        # Slower ones were proven by an earlier tune, before this one was measured, so they do not count.
        above = [key for key in proofs if key in tried and _expected_in_proof(tried[key]) >= speed]
        if not proofs or (worth_it and len(above) <= _MAX_EXTRA_PROOFS):
            return Prove(space.by_key[record.candidate_key], "the fastest candidate not yet proven")
        break
    return Stop("the fastest candidate is proven" if proofs else "nothing is left to prove")


def _is_disturbed(space: Space, records: Sequence[Record], trial: Record) -> bool:
    """Whether its only proof was so slow that something else must have used the machine.

    A script's own loop may well be slower than its trial, as it meets other batches.
    """
    speeds = [_speed(each) for each in records if (each.candidate_key, each.purpose) == (trial.candidate_key, "proof")]
    return space.workload.script is None and len(speeds) == 1 and speeds[0] < _DISTURBED * _expected_in_proof(trial)


def _expected_in_proof(record: Record) -> float:
    """Tokens/s, of which a busy allocator is expected to take more than it did in the trial."""
    seen = record.measurement
    return _speed(record) * (_UNSTEADY if seen is not None and seen.alloc_retries else 1.0)


def answer(records: Sequence[Record]) -> Record | None:
    """The proof record of DeepSpeed's fastest proven candidate; of another backend's where DeepSpeed has none."""
    everything = list(proven(records).values())
    return _fastest([each for each in everything if _is_main(each)] or everything)


def told(records: Sequence[Record], tolerance: float) -> tuple[Record | None, Record | None]:
    """The proofs that a tune's answers are made of: DeepSpeed's, and the one without where that is faster or alone."""
    found, plain = answer(records), faster_without_deepspeed(records, tolerance)
    return None if found == plain else found, plain


def faster_without_deepspeed(records: Sequence[Record], tolerance: float) -> Record | None:
    """The proof record of a candidate without DeepSpeed that is faster than DeepSpeed's by more than `tolerance`."""
    everything = list(proven(records).values())
    own = _fastest([each for each in everything if _is_main(each)])
    other = _fastest([each for each in everything if not _is_main(each)])
    if own is None or other is None:
        return other
    return other if _speed(other) > _speed(own) * (1 + tolerance) else None


def _fastest(proofs: Sequence[Record]) -> Record | None:
    return max(proofs, key=_speed, default=None)


def _speed(record: Record) -> float:
    return record.tokens_per_second or 0.0


def _is_main(record: Record) -> bool:
    return is_main(engine_in(record.candidate_key).rung)
