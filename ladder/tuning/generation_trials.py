"""Trials of a tune of generation: what a rank is told, and what its reports say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladder.backends.registry import BACKENDS, MAIN, REFERENCE, backend_of
from ladder.candidates import Engine
from ladder.events.protocol import GeneratedEvent, GenerationSpec, PhaseEvent, TrialSpec
from ladder.events.step_policy import CandidateSpec
from ladder.events.trial_run import TrialRun
from ladder.events.verdict import ending_of
from ladder.generating.search import Figures, Tried
from ladder.generating.ways import Generation, Way, from_pretrained, quantisation
from ladder.machine.described import Machine
from ladder.machine.interpreter import version_of
from ladder.machine.versions import is_within
from ladder.tuning.trial_request import environment_of
from ladder.units import format_bytes

_PLAIN = next(backend for backend in BACKENDS.values() if backend is not MAIN)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A trial to run: its way, the batches in ascending order, and its place."""

    way: Way
    batches: tuple[int, ...]
    name: str
    folder: Path
    swap: Path | None = None
    proof: bool = False


def key_of(way: Way, batch: int) -> str:
    return f"{way.name} batch={batch}"


def load_arguments(way: Way, problem: Generation) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The arguments of `from_pretrained` and of BitsAndBytesConfig, in the words of the ranks' transformers."""
    key = "dtype" if is_within(version_of("transformers"), ">=4.56") else "torch_dtype"
    arguments = from_pretrained(way, problem, dtype_key=key)
    return arguments, quantisation(way, problem, dtype=arguments[key])


def deepspeed_of(way: Way, problem: Generation, nvme_path: Path | None) -> dict[str, Any]:
    """DeepSpeed's configuration: that of a training's rung, without what trains; empty for a way without DeepSpeed."""
    if way.rung is None:
        return {}
    config = MAIN.configuration(
        problem.workload,
        Engine(way.rung),
        micro_batch=1,
        accumulation=1,
        world_size=way.processes(problem.world_size),
        nvme_path=nvme_path,
    )
    config["zero_optimization"].pop("offload_optimizer", None)
    if problem.device == "cpu" and "offload_param" in config["zero_optimization"]:
        config["zero_optimization"]["offload_param"]["pin_memory"] = False  # there is no bus to cross
    return {name: value for name, value in config.items() if name != "gradient_clipping"}


def spec_of(wanted: Wanted, problem: Generation, machine: Machine, weights: Path) -> TrialSpec:
    """The specification for the ranks."""
    way, ranks = wanted.way, wanted.way.processes(machine.world_size)
    load, quantise = load_arguments(way, problem)
    generation = GenerationSpec(
        weights=str(weights),
        load=load,
        quantise=quantise,
        own_prompts=way.own_prompts,
        every_batch=problem.asks_batches,
        prompt_len=problem.prompt_len,
        new_tokens=problem.new_tokens,
    )
    return _spec(
        wanted,
        problem,
        machine,
        ranks,
        generation=generation,
        deepspeed=deepspeed_of(way, problem, wanted.swap),
        proof=wanted.proof,
    )


def spec_that_writes(name: str, folder: Path, way: Way, problem: Generation, machine: Machine, to: Path) -> TrialSpec:
    """The trial that writes random weights into the folder `to`."""
    wanted = Wanted(way=way, batches=(1,), name=name, folder=folder)
    return _spec(wanted, problem, machine, 1, generation=GenerationSpec(weights=str(to), load=None), deepspeed={})


def _spec(
    wanted: Wanted, problem: Generation, machine: Machine, ranks: int, *, deepspeed: dict[str, Any], **more: Any
) -> TrialSpec:
    workload, engine = problem.workload, Engine(wanted.way.rung or REFERENCE.rung)
    uses_deepspeed = bool(deepspeed)
    return TrialSpec(
        trial=wanted.name,
        folder=str(wanted.folder),
        device=machine.device,
        world_size=ranks,
        gpu_uuids=tuple(gpu.uuid for gpu in machine.gpus)[: wanted.way.devices(machine.world_size)],
        model_config_json=dict(workload.model.config),
        task=workload.task,
        seq_len=workload.seq_len,
        optimizer=workload.optimizer,
        dtype=workload.dtype,
        backend_module=(backend_of(engine.rung) if uses_deepspeed else _PLAIN).rank_module,
        deepspeed=deepspeed,
        environment=environment_of(engine, ranks) if uses_deepspeed else {},
        candidates=tuple(
            CandidateSpec(key=key_of(wanted.way, batch), checkpoint_every=0, micro_batch=batch, accumulation=1)
            for batch in wanted.batches
        ),
        memory_limit=machine.memory_limit,
        **more,
    )


def results_of(run: TrialRun, way: Way) -> list[Tried]:
    """The batches that every rank generated, and the one that ended the trial, if one did."""
    spec, found = run.spec, list[Tried]()
    for candidate in spec.candidates:
        events = [_generated(events, candidate.key) for events in run.events]
        reported = [event for event in events if event is not None]
        if len(reported) == len(events):
            found.append(_tried(spec, way, candidate, reported))
    outcome, measured = ending_of(run), len(found)
    if outcome is None or measured == len(spec.candidates) or (measured and outcome.moment == "teardown"):
        return found
    culprit = spec.candidates[measured]
    ended = Tried(
        way=way.name,
        batch=culprit.micro_batch,
        trial=spec.trial,
        kind=outcome.kind,
        sentence=outcome.sentence,
        proof=spec.proof,
    )
    return [*found, ended]


def _generated(events: Sequence[Any], key: str) -> GeneratedEvent | None:
    return next((each for each in events if isinstance(each, GeneratedEvent) and each.candidate == key), None)


def _tried(spec: TrialSpec, way: Way, candidate: CandidateSpec, events: Sequence[GeneratedEvent]) -> Tried:
    first = events[0]
    devices = tuple(size for event in events for size in event.peak_devices)
    figures = Figures(
        load_seconds=first.load_seconds,
        prompt_seconds=first.prompt_seconds,
        new_seconds=first.new_seconds,
        devices=devices,
        host=sum(event.peak_host for event in events),
        tokens=tuple(tuple(row) for event in events for row in event.tokens),
        model_class=first.model_class,
    )
    fits = max(devices) <= spec.memory_limit
    held = f"a rank used {format_bytes(max(devices))} in all, more than the limit of {format_bytes(spec.memory_limit)}"
    return Tried(
        way=way.name,
        batch=candidate.micro_batch,
        trial=spec.trial,
        kind="fits" if fits else "gpu_oom",
        sentence="" if fits else held,
        proof=spec.proof,
        figures=figures if fits else None,
    )


def is_broken(run: TrialRun) -> bool:
    """The machine cannot run another trial, or nothing says why this one ended."""
    if run.stop is not None and run.stop.kind in ("environment", "lost_server"):
        return True
    begun = any(isinstance(event, PhaseEvent) for events in run.events for event in events)
    return not begun and (run.stop is None or run.stop.kind != "cancelled")
