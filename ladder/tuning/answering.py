"""The answer of a tune, made from the proof of the winner, and the files that say it; or the error if there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ladder.emit import Answer, best_config, files_of
from ladder.emit.files import OutputPaths, keep_others, write_files
from ladder.emit.plain import plain_output
from ladder.errors import LadderError, ModelNotAccessibleError, NothingFitsError, UsageError
from ladder.events.outcome import MEMORY_OUTCOMES, Measurement, Record
from ladder.events.promise import promised_range
from ladder.machine.machine_speed import mfu
from ladder.machine.versions import package_versions
from ladder.options.technique_choices import libraries_of
from ladder.report.run_data import ReportedRun
from ladder.report.writing import write_reports
from ladder.search.bound import bound
from ladder.search.ledger import Entry, ledger
from ladder.search.policy import told
from ladder.search.remedies import remedies
from ladder.search.script_faults import last_fault, part_of_script
from ladder.search.space import Space, measured, plain_as_it_stands, proofs_before, warnings_of
from ladder.tuning.own_words import in_own_words
from ladder.tuning.prepared import Prepared
from ladder.tuning.tune_events import Note, Subscriber, noting
from ladder.tuning.tuner import TuneResult
from ladder.tuning.venues.base import Venue
from ladder.units import counted, format_bytes
from ladder.workload.script import Script


@dataclass(frozen=True, kw_only=True)
class TuneOutput:
    """What a tune returns: its result, the answer if one is proven, and the files written."""

    result: TuneResult
    answer: Answer | None
    """DeepSpeed's fastest."""
    files: list[Path]
    run_dir: Path
    trial_seconds: dict[str, dict[str, float]]
    """Seconds by trial and phase."""
    simulated: str | None = None
    """The name of the machine on paper; None for a real one."""
    plain: Answer | None = None
    """The fastest without DeepSpeed, if it is faster than `answer`."""
    kept: Sequence[Path] = ()
    """Copies of files that were in the places of `files`, and were another tune's or edited."""

    @property
    def ledger(self) -> list[Entry]:
        """Every candidate of the tune, with its outcome or why it was not tried."""
        result = self.result
        return ledger(result.space, result.records, result.unsupported, on_paper=self.simulated is not None)


def answer_of(
    record: Record,
    space: Space,
    allocator: Mapping[str, str],
    versions: dict[str, str],
    run_dir: Path,
    records: Sequence[Record],
) -> Answer:
    """The answer for the emitted files, from the proof's record; `records` are those of the tune."""
    workload = space.workload
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
        mfu=mfu(workload, record.tokens_per_second, space.world_size, space.gpu_name),
        bound=limit.tokens_per_second if limit is not None else None,
        world_size=space.world_size,
        num_nodes=space.num_nodes,
        device=space.device,
        gpu_name=space.gpu_name,
        memory_limit=space.memory_limit,
        is_limited=space.is_limited,
        host_threads=max(1, space.num_cores // space.world_size),
        allocator=dict(allocator),
        nvme_path=Path(space.nvme_path) if space.nvme_path else None,
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


def write_first(prepared: Prepared, result: TuneResult, venue: Venue, tell: Subscriber) -> None:
    """Write the answer that is proven while the search goes on, and say so. A script's words take looks: not yet."""
    written = _write(prepared, result, venue, tell, in_words=False)
    if written.kept:  # the last writing finds only what this one wrote
        tell(Note(f"Kept what another tune wrote, or was edited, as {', '.join(map(str, written.kept))}"))
    found = written.answer or written.plain
    if found is not None:
        said = f"First answer: {found.candidate.key}, {found.tokens_per_second:,.0f} tokens/s in its proof"
        tell(Note(f"{said}, is in {written.files[0].name}. The search for a faster one goes on; Ctrl-C ends it."))


def deliver(
    prepared: Prepared,
    result: TuneResult,
    trial_seconds: dict[str, dict[str, float]],
    venue: Venue,
    tell: Subscriber,
) -> TuneOutput:
    """Write the answer's files and the reports."""
    written = _write(prepared, result, venue, tell)
    answer = written.answer
    reported = ReportedRun(
        folder=prepared.run_dir,
        space=result.space,
        unsupported=result.unsupported,
        records=result.records,
        trial_seconds=trial_seconds,
        facts=prepared.facts,
        config=best_config(answer) if answer else None,
    )
    for trouble in write_reports(reported, answer):
        tell(Note(f"Warning: {trouble}"))
    return TuneOutput(
        result=result,
        answer=answer,
        files=written.files,
        kept=written.kept,
        run_dir=prepared.run_dir,
        trial_seconds=trial_seconds,
        simulated=venue.paper_name,
        plain=written.plain,
    )


@dataclass(frozen=True, kw_only=True)
class _Written:
    """The answers in files."""

    answer: Answer | None
    plain: Answer | None
    files: list[Path]
    kept: Sequence[Path]


def _write(
    prepared: Prepared, result: TuneResult, venue: Venue, tell: Subscriber, *, in_words: bool = True
) -> _Written:
    """Write the answers' files, with a script's own words if `in_words`."""

    def said(found: Answer, paths: OutputPaths) -> Answer:
        return _said_in_own_words(found, prepared, paths, venue, tell) if in_words else found

    of_deepspeed, faster = told(result.records, result.space.tolerance)
    paths, answer = OutputPaths.beside(prepared.options.output), None
    plain = _answer(prepared, result, faster, venue) if faster is not None else None
    if plain is not None:
        plain = said(plain, OutputPaths.beside(plain_output(paths.config)))
    if of_deepspeed is not None:
        found = _answer(prepared, result, of_deepspeed, venue)
        answer = said(replace(found, learning_rate=prepared.options.with_optimizer, plain=plain), paths)
    texts: dict[Path, str] = {}
    for each in filter(None, (answer, plain)):
        texts |= files_of(each, paths.config)
    kept = keep_others(texts, prepared.run_dir / "written.json")
    return _Written(answer=answer, plain=plain, files=write_files(texts), kept=kept)


def _said_in_own_words(
    answer: Answer, prepared: Prepared, paths: OutputPaths, venue: Venue, tell: Subscriber
) -> Answer:
    """`answer` with the command of the user's script that trains it without ladder, if there is one."""
    if not venue.looks_again:
        return answer

    def look(command: Sequence[str]) -> Script:
        return venue.look(command, prepared.machine, lambda _: None)

    return replace(answer, own_words=in_own_words(answer, paths, look, noting(tell)))


def _answer(prepared: Prepared, result: TuneResult, proof: Record, venue: Venue) -> Answer:
    versions = package_versions(libraries_of(result.space.by_key[proof.candidate_key].engine))
    found = answer_of(proof, result.space, prepared.machine.allocator, versions, prepared.run_dir, result.records)
    return venue.signed(found)
