"""The specification of one trial for its ranks, and how long each of its phases may last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ladder.backends.registry import backend_of
from ladder.candidates import Candidate, Engine
from ladder.events.protocol import ScriptSpec, TrialSpec
from ladder.events.step_policy import CandidateSpec, StepPolicy
from ladder.launch.base import Deadlines
from ladder.machine.described import Machine
from ladder.machine.nvme import step_patience
from ladder.optimizers.registry import OPTIMIZERS
from ladder.search.cost import (
    GENERATING_STEPS,
    PROOF_SECONDS,
    PROOF_STEPS,
    SCRIPT_SECONDS,
    SCRIPT_STEPS,
    sustained_seconds,
)
from ladder.workload.modules import products_of
from ladder.workload.workload import Workload

_SCRIPT_PROOF = {"minimum": SCRIPT_STEPS, "maximum": 1000, "seconds": SCRIPT_SECONDS, "target_spread": 0.0}
"""How the proof of a user's script is timed."""
_GENERATING_PROOF = {**_SCRIPT_PROOF, "minimum": GENERATING_STEPS}
"""The same where each step generates what it trains on."""


def proof_steps(workload: Workload) -> dict[str, Any]:
    """How the proof of `workload` is timed, as fields of StepPolicy."""
    if workload.script is None:
        return {"minimum": PROOF_STEPS, "seconds": PROOF_SECONDS}
    return _SCRIPT_PROOF if workload.script.facts.generation is None else _GENERATING_PROOF


def fewest_micro_steps(candidates: Sequence[Candidate]) -> int:
    """How often the optimizer steps of a trial of `candidates`, all of one engine, accumulate at least.

    At most twice: micro-steps with and without the optimizer are timed separately, so more add nothing, but where a GPU
    rests (`sustained_seconds`); and at most three times where the first micro-step differs.
    """
    most = 3 if candidates[0].engine.first_differs else 2
    return min(most, max(candidate.accumulation for candidate in candidates))


def engine_config(
    workload: Workload,
    candidates: Sequence[Candidate],
    world_size: int,
    swap_folder: Path | None,
    *,
    proving: bool = False,
) -> dict[str, Any]:
    """DeepSpeed's configuration for a trial of `candidates`, all of one engine, which swaps to `swap_folder`.

    The proof of a user's script accumulates as the training will: its loop makes whole optimizer steps.
    """
    engine = candidates[0].engine
    is_whole = proving and workload.script is not None
    accumulation = candidates[0].accumulation if is_whole else fewest_micro_steps(candidates)
    return backend_of(engine.rung).configuration(
        workload,
        engine,
        micro_batch=candidates[0].micro_batch,
        accumulation=accumulation,
        world_size=world_size,
        nvme_path=swap_folder,
    )


def candidate_spec(
    candidate: Candidate, beat_step_seconds: float | None = None, first_within: float | None = None
) -> CandidateSpec:
    """`candidate` for the ranks; the seconds are explained in CandidateSpec."""
    return CandidateSpec(
        key=candidate.key,
        checkpoint_every=candidate.checkpoint_every,
        micro_batch=candidate.micro_batch,
        accumulation=candidate.accumulation,
        offload_activations=candidate.offload_activations,
        beat_step_seconds=beat_step_seconds,
        first_within=first_within,
    )


def trial_spec(
    name: str,
    folder: Path,
    workload: Workload,
    machine: Machine,
    engine: Engine,
    deepspeed: dict[str, Any],
    candidates: Sequence[CandidateSpec],
    *,
    steps: StepPolicy,
    proof: bool = False,
    probe: bool = False,
    stop_at: float | None = None,
    save_folder: str | None = None,
    script: ScriptSpec | None = None,
) -> TrialSpec:
    """A trial of `engine` with the configuration `deepspeed` on all ranks of `machine`; keywords as in TrialSpec."""
    sustained = 0.0 if probe else sustained_seconds(engine.rung, machine.device, proving=proof)
    return TrialSpec(
        trial=name,
        folder=str(folder),
        device=machine.device,
        world_size=machine.world_size,
        gpu_uuids=tuple(gpu.uuid for gpu in machine.gpus),
        model_config_json=dict(workload.model.config),
        task=workload.task,
        seq_len=workload.seq_len,
        optimizer=workload.optimizer,
        optimizer_module=OPTIMIZERS[workload.optimizer].rank_module,
        dtype=workload.dtype,
        **_partly_trained(workload),
        backend_module=backend_of(engine.rung).rank_module,
        deepspeed=deepspeed,
        techniques=tuple(technique.label for technique in engine.techniques),
        environment=environment_of(engine, machine.world_size),
        rank_modules=rank_modules_of(engine),
        shares_sequences=engine.shares_sequences,
        candidates=tuple(candidates),
        memory_limit=machine.memory_limit,
        steps=replace(steps, sustained_seconds=sustained),
        proof=proof,
        probe=probe,
        products=products_of(workload.model) if proof and script is None else (),
        stop_at=stop_at,
        save_folder=save_folder,
        script=script,
        # CPU ranks start in 0.1 s, and what one keeps would count as memory of the next trial (measured: up to 14 %).
        may_stay=machine.device == "cuda" and not proof and script is None,
    )


def _partly_trained(workload: Workload) -> dict[str, Any]:
    return {
        "lora": workload.lora.for_peft() if workload.lora is not None else None,
        "load_in": workload.load_in,
        "prepare_kbit": workload.prepare_kbit,
        "freeze": workload.freeze,
    }


def rank_modules_of(engine: Engine) -> tuple[str, ...]:
    """The modules that ranks import for the techniques of `engine`."""
    return tuple(technique.rank_module for technique in engine.techniques if technique.rank_module)


def environment_of(engine: Engine, world_size: int) -> dict[str, str]:
    """Variables that `engine` needs."""
    of_techniques = [technique.environment(world_size) for technique in engine.techniques]
    parts = [backend_of(engine.rung).environment(engine), *of_techniques]
    return {name: value for part in parts for name, value in part.items()}


def trial_deadlines(workload: Workload, engine: Engine) -> Deadlines:
    """Long deadlines that only distinguish a hung rank from a slow one. Offloaded states take time to allocate."""
    on_disk = "nvme" in engine.rung.devices
    slow = (60.0 if on_disk else 15.0) * workload.model.num_parameters / 1e9
    usual = Deadlines(model=120 + slow, engine=180 + slow, first_step=240 + slow)
    if not on_disk:
        return usual
    # Micro-steps without the optimizer do not use the drive, so their times say nothing about the others.
    patience = step_patience(workload)
    return replace(usual, first_step=patience, step=patience, total=max(usual.total, 12 * patience))
