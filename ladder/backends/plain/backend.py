"""Plain torch through accelerate as a backend: DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ladder.backends.base import Backend, EmittedTraining, Flaw
from ladder.backends.plain.config import fsdp_environment, plain_config, rung_in
from ladder.backends.plain.rungs import NAME, PLAIN_RUNGS
from ladder.backends.plain.step import Wrapped
from ladder.backends.plain.words import about_weights, accelerate_config, export, trainer_arguments
from ladder.candidates import Candidate, Engine, Export, Rung, Technique
from ladder.step.assignment import Assignment
from ladder.step.counted import Device
from ladder.workload.script import ScriptFacts
from ladder.workload.workload import Workload

_FLAWS = (
    Flaw(
        "accelerate",
        "<1.10",
        "has an FSDP2 with which ladder was not tried",
        lambda workload, rung: rung.stage > 0,
    ),
    Flaw(
        "transformers",
        "<4.57",
        "has a Trainer that FSDP2 cannot be asked of by `fsdp=True`",
        lambda workload, rung: (
            rung.stage > 0 and workload.script is not None and workload.script.facts.kind == "trainer"
        ),
    ),
)


class Plain(Backend):
    name = NAME
    rank_module = "ladder.trial.backends.plain"
    rungs = PLAIN_RUNGS
    option = "torch"
    help = "train without DeepSpeed, by DDP or FSDP2"

    def title(self, rung: Rung) -> str:
        return {0: "DDP", 2: "FSDP2 that keeps gathered weights for backward"}.get(rung.stage, "FSDP2")

    def flaws(self, workload: Workload) -> tuple[Flaw, ...]:
        return _FLAWS

    def place_obstacle(self, rung: Rung, device: str, world_size: int, *, own_script: bool = False) -> str:
        """On several CPU ranks, where accelerate ignores FSDP, `ladder run` starts scripts; other launchers use
        accelerate as it is. With one GPU, offload has the same bytes over the same bus as DeepSpeed's (simulated).
        """
        if device == "cuda":
            return "on one GPU, DeepSpeed's offload does the same" if world_size == 1 and rung.devices else ""
        return "accelerate has FSDP2 on GPUs only" if rung.stage > 0 and (world_size == 1 or not own_script) else ""

    def obstacle(self, workload: Workload, rung: Rung) -> str:
        """What accelerate, FSDP2 or this version cannot train.

        FSDP2 (torch 2.11 and 2.13) and accelerate 1.15 take adapters beside frozen 16-bit weights, and beside 4-bit
        weights that are stored as bf16. A shard of bitsandbytes' 8-bit weights is a plain parameter without its scales.
        """
        if workload.script is not None and (why := _of_script(workload.script.facts, rung)):
            return why
        if workload.dtype == "fp16":
            return "without DeepSpeed, ladder trains in bf16 or fp32 only"
        if rung.stage > 0 and workload.model.fails_with_fsdp2:
            return "accelerate's FSDP2 cannot divide this model, as its embeddings belong to two of the parts"
        if rung.stage > 0 and workload.load_in == "8bit":
            return "FSDP2 cannot divide 8-bit weights of bitsandbytes; --load-in 4bit can be divided"
        return ""

    def caution(self, workload: Workload, rung: Rung) -> str:
        if rung.stage > 0 or not workload.trains_16_bits:
            return ""
        return (
            "the script trains 16-bit weights without an fp32 copy, as it does by itself: small updates are lost; load "
            "its model in fp32, or take a DeepSpeed rung or FSDP2, which keep one"
        )

    def configuration(
        self,
        workload: Workload,
        engine: Engine,
        *,
        micro_batch: int,
        accumulation: int,
        world_size: int,
        nvme_path: Path | None,
    ) -> dict[str, Any]:
        return plain_config(workload, engine, micro_batch=micro_batch, accumulation=accumulation)

    def engine_in(
        self, config: Mapping[str, Any], workload: Workload, world_size: int, techniques: tuple[Technique, ...]
    ) -> Engine:
        return Engine(rung_in(config), (), techniques)

    def environment(self, engine: Engine) -> dict[str, str]:
        return fsdp_environment(engine.rung)

    def assignment(
        self, workload: Workload, candidate: Candidate, world_size: int, device: Device = "cuda"
    ) -> Assignment:
        return Wrapped(workload, candidate, world_size, device)

    def divides_weights(self, rung: Rung) -> bool:
        return rung.stage > 0

    def trainer_arguments(self, training: EmittedTraining, config: str | Mapping[str, Any]) -> dict[str, Any]:
        return trainer_arguments(training)

    def accelerate_config(self, training: EmittedTraining, config: str) -> dict[str, Any]:
        return accelerate_config(training)

    def about_weights(self, training: EmittedTraining) -> tuple[str, str]:
        return about_weights(training)

    def export(self, program: str, training: EmittedTraining, config: str) -> Export | str:
        return export(program, training)


def _of_script(facts: ScriptFacts, rung: Rung) -> str:
    """What of a user's own script cannot be trained without DeepSpeed yet."""
    if facts.kind == "deepspeed":
        return "the script calls DeepSpeed itself"
    if rung.stage > 0 and facts.kind == "accelerate" and not facts.optimizer:
        return "FSDP2 needs the model and its optimizer in one call of accelerator.prepare()"
    if facts.generation is not None:
        return "a script that generates what it trains on needs DeepSpeed"
    return ""


PLAIN = Plain()
