"""The answer of a tune: for the emitted files, from the proof of the winner, or why there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ladder.emit import Answer
from ladder.errors import ModelNotAccessibleError, NothingFitsError, UsageError
from ladder.machine.machine import Machine
from ladder.outcome import MEMORY_OUTCOMES, Record
from ladder.search.hardware import mfu
from ladder.search.remedies import remedies
from ladder.search.space import Space, warnings_of
from ladder.tuning.tuner import TuneResult
from ladder.units import format_bytes
from ladder.workload import Workload


def answer_of(
    record: Record,
    workload: Workload,
    machine: Machine,
    space: Space,
    versions: dict[str, str],
    run_dir: Path,
) -> Answer:
    """What the emitted files say, from the proof's record."""
    candidate, measurement = space.by_key[record.candidate_key], record.measurement
    assert measurement is not None
    assert record.tokens_per_second is not None
    return Answer(
        workload=workload,
        candidate=candidate,
        measurement=measurement,
        tokens_per_second=record.tokens_per_second,
        step_seconds=measurement.step_seconds(candidate.accumulation),
        mfu=mfu(workload, record.tokens_per_second, machine.world_size, machine.gpu_name),
        world_size=machine.world_size,
        device=machine.device,
        gpu_name=machine.gpu_name,
        memory_limit=machine.memory_limit,
        host_threads=machine.host_threads,
        allocator=machine.allocator,
        nvme_path=machine.nvme_path,
        versions=versions,
        run_dir=run_dir.resolve(),
        proof={
            "trial": record.trial,
            "optimizer_steps": measurement.num_steps,
            "evaluation": True,
            "gathered_16bit_weights": True,
            "tokens_per_second": round(record.tokens_per_second, 1),
        },
        warnings=warnings_of(record, space),
    )


def said_to_be_simulated(answer: Answer, machine: str) -> Answer:
    """`answer` with the name of the paper machine; the files must not be taken for measurements."""
    warning = f"simulated on the paper machine {machine}: no trial was run, so nothing here is measured or proven"
    return replace(answer, proof={"simulated": True, **answer.proof}, warnings=(warning, *answer.warnings))


def require_answer(result: TuneResult) -> Record:
    """The winner's proof. NothingFitsError says what came closest and what would fit, UsageError that time ran out."""
    if result.answer is not None:
        return result.answer
    limit = format_bytes(result.space.memory_limit)
    if result.out_of_time:
        raise UsageError(
            f"Nothing that fits in {limit} per GPU was found and proven: {result.stopped}. "
            "Start the same command again with a larger --time-budget; it goes on where it was."
        )
    failures = [record for record in result.records if record.outcome.kind != "fits"]
    last = f" The last one: {failures[-1].outcome.sentence}." if failures else ""
    if failures and all(record.outcome.moment == "model" and record.outcome.kind == "crash" for record in failures):
        raise ModelNotAccessibleError(
            f"The installed transformers cannot build this model: {failures[-1].outcome.sentence}; "
            "mend its configuration, or upgrade transformers."
        )
    failed = f"Nothing fits in {limit} per GPU: {len(failures)} candidates failed.{last}"
    if failures and not any(record.outcome.kind in MEMORY_OUTCOMES for record in failures):
        raise NothingFitsError(f"{failed} None ran out of memory; the ranks' logs in the run folder say more.")
    remedy = remedies(result.space, result.records, [rung.name for rung in result.unsupported]).sentence()
    raise NothingFitsError(f"{failed} {remedy or 'Use more or larger GPUs.'}")
