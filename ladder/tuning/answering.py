"""The answer of a tune, made from the proof of the winner for the emitted files; or the error if there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ladder.emit import Answer
from ladder.errors import LadderError, ModelNotAccessibleError, NothingFitsError, UsageError
from ladder.events.outcome import MEMORY_OUTCOMES, Measurement, Record
from ladder.events.promise import promised_range
from ladder.machine.described import Machine
from ladder.machine.machine_speed import mfu
from ladder.search.bound import bound
from ladder.search.remedies import remedies
from ladder.search.script_faults import last_fault, part_of_script
from ladder.search.space import Space, measured, plain_as_it_stands, proofs_before, warnings_of
from ladder.tuning.tuner import TuneResult
from ladder.units import counted, format_bytes
from ladder.workload.workload import Workload


def answer_of(
    record: Record,
    workload: Workload,
    machine: Machine,
    space: Space,
    versions: dict[str, str],
    run_dir: Path,
    records: Sequence[Record],
) -> Answer:
    """The answer for the emitted files, from the proof's record; `records` are those of the tune."""
    trial = measured(records).get(record.candidate_key)
    candidate, measurement = space.by_key[record.candidate_key], record.measurement
    assert measurement is not None
    assert record.tokens_per_second is not None
    limit = bound(space, records, record)
    if measurement.gradient_clipping is not None:  # which only the script's own loop knew
        workload = replace(workload, gradient_clipping=measurement.gradient_clipping)
    if workload.script is not None and trial is not None and trial.measurement is not None:
        measurement = _with_longest_samples(measurement, trial.measurement)
    return Answer(
        workload=workload,
        candidate=candidate,
        measurement=measurement,
        tokens_per_second=record.tokens_per_second,
        tokens_per_second_range=promised_range(candidate, record, trial, proofs_before(records, record)),
        step_seconds=measurement.step_seconds(candidate.accumulation),
        mfu=mfu(workload, record.tokens_per_second, machine.world_size, machine.gpu_name),
        bound=limit.tokens_per_second if limit is not None else None,
        world_size=machine.world_size,
        num_nodes=machine.num_nodes,
        device=machine.device,
        gpu_name=machine.gpu_name,
        memory_limit=machine.memory_limit,
        is_limited=space.is_limited,
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
        as_it_stands=plain_as_it_stands(space, records),
    )


def _with_longest_samples(proof: Measurement, trial: Measurement) -> Measurement:
    """`proof` with the memory of `trial` where that took more: a script's own loop may not meet its longest samples."""
    peaks = ("peak_allocated", "peak_reserved", "peak_device", "peak_host")
    return replace(proof, **{name: max(getattr(proof, name), getattr(trial, name)) for name in peaks})


def said_to_be_simulated(answer: Answer, name: str) -> Answer:
    """`answer` with warnings that it is simulated on the machine `name`, so that nobody takes it for measured."""
    warning = f"simulated on {name}: a simulator answered each trial and the proof, and no GPU ran"
    return replace(answer, proof={"simulated": True, **answer.proof}, warnings=(warning, *answer.warnings))


def require_answer(result: TuneResult) -> Record:
    """The winner's proof; raises `why_none` if there is none."""
    if result.answer is None:
        raise why_none(result)
    return result.answer


def why_none(result: TuneResult) -> LadderError:
    """The error for a tune without an answer.

    UsageError if a user's own script failed in its proofs, the time ran out or no rung can work here,
    ModelNotAccessibleError if the model cannot be built, and otherwise NothingFitsError, which says what would fit.
    """
    if not result.space.engines:
        reasons = "; ".join(f"{rung.name}: {reason}" for rung, reason in result.unsupported.items())
        return UsageError(f"None of the rungs to try can work here: {reasons}.")
    on_cpu = result.space.device == "cpu"
    limit = f"{format_bytes(result.space.memory_limit)} per {'CPU rank' if on_cpu else 'GPU'}"
    if (fault := last_fault(result.space, result.records)) is not None:
        return UsageError(
            f"The script's own {part_of_script(fault)} failed in the proof of {fault.candidate_key}: "
            f"{fault.outcome.sentence} ({_log_of(fault)}). Its trials fit in memory: mend the script, and start the "
            "same command again."
        )
    if result.out_of_time:
        return UsageError(
            f"Nothing that fits in {limit} was found and proven: {result.stopped}. "
            "Start the same command again with a larger --time-budget; it continues where it stopped."
        )
    failures = [record for record in result.records if record.outcome.kind != "fits"]
    last = f" The last failure: {failures[-1].outcome.sentence}." if failures else ""
    if (error := _without_training(result, failures)) is not None:
        return error
    failed = f"Nothing fits in {limit}: {counted(len(failures), 'candidate')} failed.{last}"
    if failures and not any(record.outcome.kind in MEMORY_OUTCOMES for record in failures):
        return NothingFitsError(f"{failed} None ran out of memory; see the ranks' logs in the run folder.")
    otherwise = "Allow more with --gpu-memory." if on_cpu else "Use more or larger GPUs."
    found = remedies(result.space, result.records, [rung.name for rung in result.unsupported])
    return NothingFitsError(f"{failed} {found.sentence(on_cpu=on_cpu) or otherwise}")


def _without_training(result: TuneResult, failures: list[Record]) -> LadderError | None:
    """The error for a tune in which nothing was measured, and not for want of memory or time."""
    if not failures or any(record.outcome.kind != "crash" for record in result.records):
        return None
    outcome = failures[-1].outcome
    if result.space.workload.script is not None:
        return UsageError(
            f"The script failed before its training was measured: {outcome.sentence} ({_log_of(failures[-1])})."
        )
    if all(record.outcome.moment == "model" for record in failures):
        return ModelNotAccessibleError(
            f"The installed transformers cannot build this model: {outcome.sentence}; correct its config.json, or "
            "upgrade transformers."
        )
    return None


def _log_of(record: Record) -> str:
    return f"its output is in trials/{record.trial}/rank{record.outcome.rank or 0}.log of the run folder"
