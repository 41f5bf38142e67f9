"""Tunes how a model is held for generating: the ways by short trials, the fastest proven in fresh processes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ladder.emit.files import keep_others, write_files
from ladder.emit.generation import GenerationAnswer, generation_files
from ladder.errors import EnvironmentFaultError, NothingFitsError, UsageError
from ladder.events.as_json import from_plain
from ladder.generating.memory import predicted
from ladder.generating.search import Tried, best, generates_something_else, next_way, reference_of
from ladder.generating.ways import GENERATE, WAYS, WAYS_BY_NAME, WRITER, Generation, Way, batches_of, sorted_out
from ladder.launch.counting import counting
from ladder.machine.described import Machine
from ladder.machine.environment import ranks_in
from ladder.machine.interpreter import version_of
from ladder.machine.lease import Leases
from ladder.machine.versions import versions_of_ranks
from ladder.options.checks import require_text
from ladder.options.declaring import checked
from ladder.options.generation import NEW_TOKENS, PROMPT_LEN, require_effective
from ladder.options.plan import PlanOptions
from ladder.options.tune import TuneOptions
from ladder.runs.history import History
from ladder.text import digest_of, shown
from ladder.tuning.generation_trials import engine_of, results_of, spec_of
from ladder.tuning.operators import OperatorMissingError
from ladder.tuning.outputs import read_files, require_writable
from ladder.tuning.planning import machine_named, machine_on_paper
from ladder.tuning.precision import dtype_of
from ladder.tuning.prepared import slug
from ladder.tuning.problem import run_fingerprint
from ladder.tuning.run import disk_faults
from ladder.tuning.trial_request import trial_deadlines
from ladder.tuning.tune_events import Note, Subscriber, hearing, ignore, noting
from ladder.tuning.venues.base import OpenVenue
from ladder.tuning.venues.here import ThisHost
from ladder.units import format_bytes, gib
from ladder.workload.source import resolve_model, weights_of
from ladder.workload.workload import Workload

_WEIGHTS = "*.safetensors"
"""Files that trials load; others may hold code."""


@dataclass(frozen=True, kw_only=True)
class Generated:
    """What a tune of generation returns; `answer` is None if it was interrupted before it had one."""

    answer: GenerationAnswer | None
    left_out: dict[str, str]
    """By way: why it was not tried."""
    files: Sequence[Path] = ()
    kept: Sequence[Path] = ()
    """Copies of what another tune had written in the places of `files`."""
    run_dir: Path


def run_generation(
    options: TuneOptions, tell: Subscriber = ignore, cancelled: Callable[[], bool] = lambda: False
) -> Generated:
    """Tune, prove, and write the answer. Raises a LadderError for everything that is not a bug."""
    options = checked(options)
    require_effective(options)
    require_text(options)
    if options.machine is not None:
        raise UsageError(f"--task {GENERATE} is tuned on this host; leave --machine out, or use `ladder plan`.")
    output = Path("best_generation.json") if options.output == TuneOptions.output else options.output
    with (
        ranks_in(options.python),
        Leases(wait=options.wait, note=noting(tell), cancelled=cancelled) as leases,
        closing(ThisHost(options, leases, tell, cancelled)) as venue,
    ):
        problem = _generation_of(options, venue.machine(), noting(tell))
        workload, machine = problem.workload, problem.machine
        possible, left_out = sorted_out(problem)
        require_writable(output, read_files(options, workload.model))
        folder = Path(options.model).resolve() if workload.model.source == "folder" else None
        weights = sorted(folder.glob(_WEIGHTS)) if folder is not None else []
        _, facts = run_fingerprint(workload, machine, dict(problem.versions))
        facts |= {name: str(getattr(problem, name)) for name in ("prompt_len", "new_tokens", "batches", "load_in")}
        facts["weights"] = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in weights]
        fingerprint = digest_of(facts, 12)
        run_dir = options.run_dir or Path("ladder-runs") / f"{slug(workload.model.name)}-{GENERATE}-{fingerprint}"
        leases.name_run(run_dir)
        with (
            History(run_dir, fingerprint, facts) as history,
            disk_faults(history),
            venue.opened(machine, workload, [], run_dir) as place,
            closing(_Tune(problem, place, history, folder if weights else None, left_out, tell, cancelled)) as tune,
        ):
            proof = tune.run(possible)
        found = Generated(answer=None, left_out=left_out, run_dir=run_dir)
        if proof is None:
            return found
        model = weights_of(problem.workload.model) if folder is None else str(folder)
        answer = GenerationAnswer(problem=problem, proof=proof, model=model, tried=tune.tried, left_out=left_out)
        texts = generation_files(answer, output)
        kept = keep_others(texts, run_dir / "written.json")
        return replace(found, answer=answer, files=write_files(texts), kept=kept)


def plan_of_generation(options: PlanOptions, note: Callable[[str], None]) -> tuple[Generation, list[dict[str, Any]]]:
    """What is generated, and for each way its memory with the smallest batch, and whether it fits."""
    require_effective(options)
    with ranks_in(options.python, must_train=False):
        simulated = machine_named(options.machine, options.gpus, options.gpu_memory)
        machine = machine_on_paper(options, simulated)
        if simulated is None or simulated.nvme_space > 0:
            machine = replace(machine, nvme_path=Path("drive"))
        problem = _generation_of(options, machine, note)
    rows, (_, reasons) = [], sorted_out(problem)
    for way in (each for each in WAYS if not problem.asked or each.name in problem.asked):
        memory, why = predicted(way, problem, min(problem.batches, default=1)), reasons.get(way.name, "")
        fits = memory.device <= machine.memory_limit and memory.host <= machine.host_memory
        sizes = {f"{part}_gib": gib(size) for part, size in (memory._asdict() | {"device": memory.device}).items()}
        rows.append({"way": way.name, "fits": "–" if why else "yes" if fits else "no", "why": why, **sizes})
    return problem, rows


def _generation_of(options: TuneOptions | PlanOptions, machine: Machine, note: Callable[[str], None]) -> Generation:
    shape = resolve_model(options.model, count=counting(note))
    if shape.note:
        note(shape.note)
    prompt_len, new_tokens = options.prompt_len or PROMPT_LEN, options.new_tokens or NEW_TOKENS
    length = prompt_len + new_tokens
    if shape.made_for is not None and length > shape.made_for:
        note(f"{length:,} tokens are more than the {shape.made_for:,} that the model was made for.")
    dtype = dtype_of(options.dtype, machine, note)
    return Generation(
        workload=Workload(model=shape, task=shape.task, seq_len=length, global_batch_size=1, dtype=dtype),
        machine=machine,
        versions=versions_of_ranks() | {"bitsandbytes": version_of("bitsandbytes")},
        prompt_len=prompt_len,
        new_tokens=new_tokens,
        batches=tuple(sorted(set(options.batches))),
        asked=options.ways,
        load_in=options.load_in,
        allow=options.allow,
    )


class _Tune:
    """One tune of generation. What it tried is in the run folder after every trial."""

    def __init__(
        self,
        problem: Generation,
        place: OpenVenue,
        history: History,
        own: Path | None,
        left_out: dict[str, str],
        tell: Subscriber,
        cancelled: Callable[[], bool],
    ) -> None:
        """`own` is the model's folder, if it has weights: trials load these, and random ones otherwise."""
        self._problem, self._place, self._history, self._own = problem, place, history, own
        self._written, self._left_out = history.folder.resolve() / "weights", left_out
        self._tell, self._cancelled = tell, cancelled
        self.close()  # a killed tune may have left a part of them
        self.tried = [from_plain(Tried, each) for each in (history.space or {"tried": ()})["tried"]]

    def run(self, possible: Sequence[Way]) -> Tried | None:
        """Try the ways and prove the fastest: the proof, or None if interrupted. NothingFitsError if no way fits."""
        while not self._cancelled():
            left = [way for way in possible if way.name not in self._left_out]
            way, left_out = next_way(left, self._problem, self.tried)
            if way is not None:
                self._try(way, batches_of(way, self._problem), proof=False)
                continue
            self._left_out |= left_out
            answer = best(self.tried, self._problem.new_tokens)
            if answer is None:
                raise NothingFitsError(self._why_none())
            for each in self.tried:
                if each.proof and (each.way, each.batch) == (answer.way, answer.batch):
                    return each
            self._try(WAYS_BY_NAME[answer.way], (answer.batch,), proof=True)
        return None

    def close(self) -> None:
        """Remove random weights; the folder of the model's own stays as it is."""
        shutil.rmtree(self._written, ignore_errors=True)

    def _try(self, way: Way, batches: tuple[int, ...], *, proof: bool) -> None:
        operators = self._place.operators
        try:
            if way.rung is not None and operators is not None:
                operators.need(way.rung)
        except OperatorMissingError as missing:
            self._left_out[way.name] = str(missing)
            return
        if self._own is None and not self._written.exists():
            for failed in self._run(WRITER, (1,), proof=False):
                raise EnvironmentFaultError(f"{failed.sentence}; name a folder that has the model's weights.")
        results = self._run(way, batches, proof=proof)
        if not results and not self._cancelled():
            raise EnvironmentFaultError(f"No rank reported anything; see {self._history.folder / 'server.log'}.")
        for each in results:
            how = f"{each.kind}: {each.sentence}"
            if each.seen is not None:
                speed, held = each.tokens_per_second(self._problem.new_tokens), max(each.seen.peak_devices)
                how = f"{speed:,.1f} tokens/s, {format_bytes(held)}"
            self._tell(Note(f"  {way.name} batch={each.batch}: {how}"))
        self.tried += results
        self._history.note_space({"tried": [asdict(each) for each in self.tried]}, self._left_out)

    def _run(self, way: Way, batches: tuple[int, ...], *, proof: bool) -> list[Tried]:
        if self._cancelled():
            return []
        (name, folder), drive = self._history.next_trial(), self._place.machine.nvme_path
        swap = drive / f"{self._place.swap_prefix}-{name}" if drive is not None else None
        spec = spec_of(way, batches, self._problem, folder, self._own or self._written, swap, proof=proof)
        self._tell(Note(f"trial {name}: {'proof of ' if proof else ''}{way.name}, {way.title}"))
        deadlines = trial_deadlines(self._problem.workload, engine_of(way))
        run = self._place.launcher.run(spec, deadlines, hearing(self._tell))
        ended = [each for each in results_of(run, way.name) if each.kind != "cancelled"]
        return [self._compared(each) for each in ended] if proof else ended

    def _compared(self, proof: Tried) -> Tried:
        """A proof that generates something else has failed."""
        if proof.seen is None or WAYS_BY_NAME[proof.way].load_in is not None:
            return proof
        reference = reference_of(self.tried, proof)
        if not generates_something_else(proof.seen.tokens, reference.figures.tokens):
            return proof
        return replace(proof, kind="crash", sentence=f"it generates other tokens than {reference.way}", seen=None)

    def _why_none(self) -> str:
        ends = {each.way: each.sentence for each in self.tried if each.kind != "fits"} | self._left_out
        least = min(predicted(way, self._problem, 1).device for way in WAYS if way.load_in is None)
        said = "; ".join(f"{name}: {why}" for name, why in ends.items())
        name = shown(self._problem.workload.model.name)
        return f"No way holds {name} ({said}). The least that any is predicted to need is {format_bytes(least)}."
