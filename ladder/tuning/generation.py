"""Tunes how a model is held for generating: the ways by short trials, the fastest proven in fresh processes."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ladder.candidates import Engine
from ladder.emit.files import keep_others, write_atomically, write_files
from ladder.emit.generation import GenerationAnswer, generation_files
from ladder.errors import EnvironmentFaultError, NothingFitsError, UsageError
from ladder.events.as_json import NotReadError, from_plain
from ladder.generating.memory import predicted
from ladder.generating.search import (
    Tried,
    best,
    generates_something_else,
    next_way,
    proof_of,
    reference_of,
    require_weights_written,
    share_that_differs,
)
from ladder.generating.ways import BATCHES, WAYS, Generation, Way, sorted_out
from ladder.launch.counting import counting
from ladder.machine.described import Machine
from ladder.machine.environment import ranks_in
from ladder.machine.host import environment_of_a_cpu_rank
from ladder.machine.interpreter import version_of
from ladder.machine.lease import Leases
from ladder.runs.history import make_private
from ladder.text import digest_of, shown
from ladder.tuning.declaring import checked
from ladder.tuning.generation_options import NEW_TOKENS, PROMPT_LEN, require_effective
from ladder.tuning.generation_trials import (
    Wanted,
    deepspeed_of,
    is_broken,
    key_of,
    load_arguments,
    results_of,
    spec_of,
    spec_that_writes,
)
from ladder.tuning.operators import OperatorMissingError
from ladder.tuning.option_checks import require_text
from ladder.tuning.options import TuneOptions, WorkloadOptions
from ladder.tuning.outputs import read_files, require_writable
from ladder.tuning.precision import dtype_of, major_capability
from ladder.tuning.prepared import slug
from ladder.tuning.problem import run_fingerprint
from ladder.tuning.trial_request import trial_deadlines
from ladder.tuning.tune_events import Note, Subscriber, hearing, ignore, noting
from ladder.tuning.venue import OpenVenue, ThisHost, is_on_nodes
from ladder.tuning.versions import package_versions
from ladder.units import format_bytes, parameters_in_words
from ladder.workload.source import resolve_model
from ladder.workload.workload import Workload

STATE = "generation.json"
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True, kw_only=True)
class Generated:
    """What a tune of generation returns."""

    answer: GenerationAnswer | None
    """None if it was interrupted before it had one."""
    tried: tuple[Tried, ...]
    left_out: dict[str, str]
    """By way: why it was not tried."""
    files: list[Path]
    kept: list[Path]
    run_dir: Path


def generation_of(options: Any, machine: Machine, note: Callable[[str], None], *, has_nvme: bool) -> Generation:
    """What `options`, of a tune or a plan, ask to generate on `machine`. UsageError for what cannot be."""
    shape = resolve_model(options.model, count=counting(note))
    if shape.note:
        note(shape.note)
    capability = major_capability(machine) if machine.gpus else None
    prompt_len, new_tokens = options.prompt_len or PROMPT_LEN, options.new_tokens or NEW_TOKENS
    workload = Workload(
        model=shape,
        task=shape.task,
        seq_len=prompt_len + new_tokens,
        global_batch_size=1,
        dtype=dtype_of(options.dtype, machine.gpu_name, note, capability),
    )
    if shape.made_for is not None and workload.seq_len > shape.made_for:
        note(f"{workload.seq_len:,} tokens are more than the {shape.made_for:,} that the model was made for.")
    missing = [name for name in ("bitsandbytes", "deepspeed") if not version_of(name)]
    return Generation(
        workload=workload,
        prompt_len=prompt_len,
        new_tokens=new_tokens,
        batches=tuple(sorted(set(options.batches))) or BATCHES,
        asks_batches=bool(options.batches),
        asked=options.ways,
        load_in=options.load_in,
        allow=options.allow,
        world_size=machine.world_size,
        device=machine.device,
        memory_limit=machine.memory_limit,
        host_memory=machine.host_memory,
        has_nvme=has_nvme,
        missing={name: f"{name} is not installed; `pip install {name}`" for name in missing},
    )


def run_generation(
    options: TuneOptions, tell: Subscriber = ignore, cancelled: Callable[[], bool] = lambda: False
) -> Generated:
    """Tune, prove, and write the answer. Raises a LadderError for everything that is not a bug."""
    options = checked(options)
    require_effective(options)
    require_text(options)
    if options.launcher != "local" or options.machine is not None or is_on_nodes(options):
        raise UsageError("Generating is tuned on this host only; leave --launcher and --machine out.")
    output = Path("best_generation.json") if options.output == TuneOptions.output else options.output
    with (
        ranks_in(options.python),
        Leases(wait=options.wait, note=noting(tell), cancelled=cancelled) as leases,
        closing(ThisHost(options, leases, tell, cancelled)) as venue,
    ):
        machine = venue.machine()
        problem = generation_of(options, machine, noting(tell), has_nvme=options.nvme_path is not None)
        possible, unsupported = sorted_out(problem)
        require_writable(output, read_files(options, problem.model))
        own = _own_weights(options, problem)
        fingerprint, run_dir = _place(options, problem, machine, own)
        leases.name_run(run_dir)
        with _locked(run_dir), venue.opened(machine, problem.workload, [], run_dir) as opened:
            tell(Note(_introduction(problem, machine)))
            tune = _Tune(problem, opened, run_dir, fingerprint, own, unsupported, tell, cancelled)
            try:
                answer = tune.run(possible)
            finally:
                tune.close()
        return _delivered(tune, answer, options, machine, output)


def _own_weights(options: WorkloadOptions, problem: Generation) -> Path | None:
    """The folder of the model, if it has weights: trials load these, and random ones otherwise."""
    folder = Path(options.model)
    is_folder = problem.model.source == "folder"
    return folder.resolve() if is_folder and any(next(folder.glob(each), None) for each in _WEIGHTS) else None


def _place(options: TuneOptions, problem: Generation, machine: Machine, own: Path | None) -> tuple[str, Path]:
    """The fingerprint of what is tuned, and its run folder."""
    known, _ = run_fingerprint(problem.workload, machine, package_versions(("bitsandbytes",)))
    files = sorted(path for each in _WEIGHTS for path in own.glob(each)) if own is not None else []
    weights = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    facts = [known, problem.prompt_len, problem.new_tokens, problem.batches, problem.load_in, str(own), weights]
    fingerprint = digest_of(facts, 12)
    name = f"{slug(problem.model.name)}-generate-{fingerprint}"
    return fingerprint, options.run_dir or Path("ladder-runs") / name


@contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """Within it, no other tune uses the run folder."""
    make_private(run_dir)
    descriptor = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise EnvironmentFaultError(
            f"Another tune is using {shown(run_dir)}; wait for it or choose another --run-dir."
        ) from None
    finally:
        os.close(descriptor)


def _introduction(problem: Generation, machine: Machine) -> str:
    ranks = f"{machine.world_size} × {machine.gpu_name}" if machine.gpus else f"{machine.world_size} CPU ranks"
    return (
        f"{shown(problem.model.name)} ({parameters_in_words(problem.model.num_parameters)}) on {ranks}, "
        f"{format_bytes(problem.memory_limit)} each; {problem.workload.dtype}, prompts of {problem.prompt_len} tokens, "
        f"{problem.new_tokens} new ones."
    )


class _Tune:
    """One tune of generation. What it tried is in the run folder after every trial."""

    def __init__(
        self,
        problem: Generation,
        place: OpenVenue,
        run_dir: Path,
        fingerprint: str,
        own: Path | None,
        left_out: dict[str, str],
        tell: Subscriber,
        cancelled: Callable[[], bool],
    ) -> None:
        self.problem, self.run_dir, self.left_out = problem, run_dir, dict(left_out)
        self._machine, self._operators, self._launcher = place.machine, place.operators, place.launcher
        self._swap_prefix, self._fingerprint, self._own = place.swap_prefix, fingerprint, own
        self._tell, self._cancelled = tell, cancelled
        self._written: Path | None = None
        self.tried = self._known()

    def run(self, possible: list[Way]) -> Tried | None:
        """Try the ways, then prove the fastest; the proof, or None if it was interrupted. NothingFitsError if no way
        fits."""
        while not self._cancelled():
            way, left_out = next_way(possible, self.problem, self.tried)
            if way is None:
                self.left_out |= left_out
                break
            self._try(way, self._batches(way), proof=False)
            possible = [each for each in possible if each.name not in self.left_out]
        while not self._cancelled():
            answer = best(self.tried, self.problem)
            if answer is None:
                raise NothingFitsError(self._why_none())
            proof = proof_of(self.tried, answer)
            if proof is not None:
                return proof
            way = next(each for each in WAYS if each.name == answer.way)
            self._try(way, (answer.batch,), proof=True)
        return None

    def close(self) -> None:
        """Remove random weights; the folder of the model's own stays as it is."""
        if self._written is not None:
            shutil.rmtree(self._written, ignore_errors=True)

    def _batches(self, way: Way) -> tuple[int, ...]:
        """Those in which each copy has a prompt: with fewer, one device alone is as fast."""
        copies = way.processes(self.problem.world_size) if way.own_prompts and way.rung is None else 1
        return tuple(batch for batch in self.problem.batches if batch >= copies)

    def _try(self, way: Way, batches: tuple[int, ...], *, proof: bool) -> None:
        if way.rung is not None and self._operators is not None:
            try:
                self._operators.need(way.rung)
            except OperatorMissingError as missing:
                self.left_out[way.name] = str(missing)
                return
        weights = self._weights(way)
        if self._cancelled():
            return
        name, folder = self._next()
        swap = self._machine.nvme_path / f"{self._swap_prefix}-{name}" if self._machine.nvme_path else None
        wanted = Wanted(way=way, batches=batches, name=name, folder=folder, swap=swap, proof=proof)
        self._tell(Note(f"trial {name}: {'proof of ' if proof else ''}{way.name}, {way.title}"))
        results = self._run(spec_of(wanted, self.problem, self._machine, weights), way)
        if proof:
            results = [self._compared(each, way) for each in results]
        for each in results:
            self._tell(Note(f"  {key_of(way, each.batch):<28} {self._said(each)}"))
        self.tried += results
        self._keep()

    def _run(self, spec: Any, way: Way) -> list[Tried]:
        deadlines = trial_deadlines(self.problem.workload, Engine(way.rung or WAYS[-3].rung))  # type: ignore[arg-type]
        run = self._launcher.run(spec, deadlines, hearing(self._tell))
        if is_broken(run):
            why = run.stop.sentence if run.stop is not None else "no rank reported anything"
            raise EnvironmentFaultError(f"Trial {spec.trial} ended without a result: {why}; see {spec.folder}.")
        return [each for each in results_of(run, way) if each.kind != "cancelled"]

    def _weights(self, way: Way) -> Path:
        """The folder that trials load: the model's own, or one of random weights, written when first needed."""
        if self._own is not None or self._written is not None:
            return self._own or self._written  # type: ignore[return-value]
        folder = self.run_dir / "weights"
        shutil.rmtree(folder, ignore_errors=True)
        needed = int(self.problem.workload.width * self.problem.model.num_parameters)
        free = shutil.disk_usage(self.run_dir).free
        if needed > free:
            raise EnvironmentFaultError(
                f"Random weights for the trials take {format_bytes(needed)}, and {shown(self.run_dir)} has "
                f"{format_bytes(free)}; name a --run-dir elsewhere, or a folder that has the model's weights."
            )
        self._written = folder.resolve()
        name, place = self._next()
        self._tell(Note(f"trial {name}: writes random weights, {format_bytes(needed)}, which every way loads"))
        failed = self._run(spec_that_writes(name, place, way, self.problem, self._machine, self._written), way)
        require_weights_written(failed[0] if failed else None)
        return self._written

    def _next(self) -> tuple[str, Path]:
        trials = self.run_dir / "trials"
        trials.mkdir(exist_ok=True)
        name = f"{max((int(each.name) for each in trials.iterdir() if each.name.isdigit()), default=0) + 1:04d}"
        return name, trials / name

    def _compared(self, proof: Tried, way: Way) -> Tried:
        """A proof that generates something else has failed."""
        reference = reference_of(self.tried, proof)
        known = next((each for each in self.tried if self._is_of(each, reference)), None)
        if proof.figures is None or known is None or known.figures is None or not way.is_exact:
            return proof
        if not generates_something_else(proof.figures.tokens, known.figures.tokens):
            return proof
        sentence = f"it generates other tokens than {reference.way}"
        return replace(proof, kind="crash", sentence=sentence, figures=None)

    @staticmethod
    def _is_of(each: Tried, reference: Tried) -> bool:
        return not each.proof and (each.way, each.batch) == (reference.way, reference.batch)

    def differing(self, proof: Tried) -> tuple[str, float]:
        """The way whose tokens the proof's are compared with, and the share that differs."""
        reference = reference_of(self.tried, proof)
        known = next(each for each in self.tried if self._is_of(each, reference))
        assert proof.figures is not None
        assert known.figures is not None
        return reference.way, share_that_differs(proof.figures.tokens, known.figures.tokens)

    def _said(self, each: Tried) -> str:
        if each.figures is None:
            return f"{each.kind}: {each.sentence}"
        speed = each.tokens_per_second(self.problem.new_tokens)
        return f"{speed:>10,.1f} tokens/s {format_bytes(max(each.figures.devices)):>10}"

    def _why_none(self) -> str:
        ends = {each.way: f"{each.way}: {each.sentence}" for each in reversed(self.tried) if each.kind != "fits"}
        said = "; ".join([*ends.values(), *(f"{name}: {why}" for name, why in self.left_out.items())])
        least = min(predicted(way, self.problem, 1).device for way in WAYS if way.is_exact)
        return (
            f"No way holds {shown(self.problem.model.name)} ({said}). The least that any is predicted to need is "
            f"{format_bytes(least)} on each device."
        )

    def _known(self) -> list[Tried]:
        """What an earlier start of the same tune tried. UsageError for the folder of another one."""
        try:
            found = json.loads((self.run_dir / STATE).read_bytes())
            if found["fingerprint"] == self._fingerprint:
                return [from_plain(Tried, each) for each in found["tried"]]
        except FileNotFoundError:
            if not (self.run_dir / "journal.log").exists():
                return []
        except (ValueError, KeyError, TypeError, NotReadError):
            pass
        raise UsageError(f"{shown(self.run_dir)} holds the history of another tune; choose another --run-dir.")

    def _keep(self) -> None:
        found = {"fingerprint": self._fingerprint, "tried": [asdict(each) for each in self.tried]}
        write_atomically(self.run_dir / STATE, json.dumps(found))


def _delivered(tune: _Tune, proof: Tried | None, options: TuneOptions, machine: Machine, output: Path) -> Generated:
    """Write the answer's files."""
    if proof is None:
        return Generated(
            answer=None, tried=tuple(tune.tried), left_out=tune.left_out, files=[], kept=[], run_dir=tune.run_dir
        )
    problem = tune.problem
    way = next(each for each in WAYS if each.name == proof.way)
    load, quantise = load_arguments(way, problem)
    reference, differing = tune.differing(proof)
    is_path = problem.model.source in ("folder", "file")
    answer = GenerationAnswer(
        problem=problem,
        way=way,
        proof=proof,
        model=str(Path(options.model).resolve()) if is_path else options.model,
        from_pretrained=load,
        quantisation=quantise,
        deepspeed=deepspeed_of(way, problem, machine.nvme_path) or None,
        environment=_environment(machine),
        reference=reference,
        differing=differing,
        tried=tuple(tune.tried),
        left_out=tune.left_out,
        gpu_name=machine.gpu_name,
        versions=package_versions(),
    )
    texts = generation_files(answer, output)
    kept = keep_others(texts, tune.run_dir / "written.json")
    return Generated(
        answer=answer,
        tried=answer.tried if isinstance(answer.tried, tuple) else tuple(answer.tried),
        left_out=tune.left_out,
        files=write_files(texts),
        kept=kept,
        run_dir=tune.run_dir,
    )


def _environment(machine: Machine) -> dict[str, str]:
    """What a script needs to run as the trials did."""
    shared = {"OMP_NUM_THREADS": str(machine.host_threads), "DS_ACCELERATOR": machine.device}
    if machine.device == "cuda":
        return shared | machine.allocator
    return shared | {"CUDA_VISIBLE_DEVICES": "", **environment_of_a_cpu_rank(os.environ)}
