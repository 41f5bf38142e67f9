"""Trials of a tune of generation: what a rank is told, and what its reports say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ladder.backends.registry import REFERENCE_OF_TORCH
from ladder.candidates import Engine
from ladder.errors import EnvironmentFaultError
from ladder.events.protocol import GeneratedEvent, GenerationSpec, TrialSpec
from ladder.events.step_policy import CandidateSpec, StepPolicy
from ladder.events.trial_run import TrialRun
from ladder.events.verdict import ending_of
from ladder.generating.search import Tried
from ladder.generating.ways import WRITER, Generation, Way, deepspeed_of, from_pretrained
from ladder.tuning.trial_request import trial_spec


def engine_of(way: Way) -> Engine:
    """DeepSpeed's, or one that says that there is none."""
    return Engine(way.rung) if way.rung is not None else REFERENCE_OF_TORCH


def spec_of(
    way: Way,
    batches: tuple[int, ...],
    problem: Generation,
    folder: Path,
    weights: Path,
    swap: Path | None,
    *,
    proof: bool,
) -> TrialSpec:
    """A trial of `way` in `folder`, with `weights`."""
    machine = problem.machine
    candidates = [
        CandidateSpec(key=f"{way.name} batch={batch}", checkpoint_every=0, micro_batch=batch, accumulation=1)
        for batch in batches
    ]
    place, config = (folder.name, folder, problem.workload, machine), deepspeed_of(way, problem, swap)
    spec = trial_spec(*place, engine_of(way), config, candidates, steps=StepPolicy(), proof=proof)
    return replace(
        spec,
        world_size=way.processes(machine.world_size),
        gpu_uuids=spec.gpu_uuids[: way.devices(machine.world_size)],
        may_stay=False,
        products=(),
        generation=GenerationSpec(
            weights=str(weights),
            load=from_pretrained(way, problem) if way is not WRITER else None,
            own_prompts=way.own_prompts,
            every_batch=bool(problem.batches),
            prompt_len=problem.prompt_len,
            new_tokens=problem.new_tokens,
        ),
    )


def results_of(run: TrialRun, way: str) -> list[Tried]:
    """The batches that every rank generated, and the one that ended the trial, if one did.

    EnvironmentFaultError if the machine cannot run another trial.
    """
    if run.stop is not None and run.stop.kind in ("environment", "lost_server"):
        raise EnvironmentFaultError(f"Trial {run.spec.trial} ended without a result: {run.stop.sentence}")
    spec, found = run.spec, list[Tried]()
    tried = Tried(way=way, batch=0, trial=spec.trial, kind="fits", proof=spec.proof)
    for candidate in spec.candidates:
        each = [
            event
            for events in run.events
            for event in events
            if isinstance(event, GeneratedEvent) and event.candidate == candidate.key
        ]
        if len(each) == spec.world_size:
            seen = replace(
                each[0],
                peak_devices=[size for event in each for size in event.peak_devices],
                peak_host=sum(event.peak_host for event in each),
                tokens=[row for event in each for row in event.tokens],
            )
            found.append(replace(tried, batch=candidate.micro_batch, seen=seen))
    outcome, measured = ending_of(run), len(found)
    if outcome is None or measured == len(spec.candidates) or (measured and outcome.moment == "teardown"):
        return found
    batch = spec.candidates[measured].micro_batch
    return [*found, replace(tried, batch=batch, kind=outcome.kind, sentence=outcome.sentence)]
