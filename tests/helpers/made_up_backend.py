"""A backend that does not exist: torch's DDP alone, which promises half of the time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ladder.backends.base import Backend, EmittedTraining
from ladder.backends.plain.step import Wrapped
from ladder.candidates import Candidate, Engine, Export, Rung
from ladder.machine.machine_speed import MachineSpeed
from ladder.step.assignment import Assignment
from ladder.step.clock import StepParts
from ladder.step.counted import Device
from ladder.workload.workload import Workload

NAME = "magic"


class Enchanted(Wrapped):
    def time_on(self, machine: MachineSpeed) -> StepParts:
        usual = super().time_on(machine)
        return replace(usual, compute=usual.compute / 2, ramp=usual.ramp / 2, launch=usual.launch / 2, handling=0.0)


class MadeUpBackend(Backend):
    name = NAME
    rank_module = "helpers.made_up_rank"
    rungs = (Rung("magic", 0, backend=NAME),)

    def place_obstacle(self, rung: Rung, device: str, world_size: int, *, own_script: bool = False) -> str:
        return "magic needs two ranks" if world_size == 1 else ""

    def obstacle(self, workload: Workload, rung: Rung) -> str:
        return "" if workload.task == "causal-lm" else "magic is for causal-lm"

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
        return {
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": workload.gradient_clipping,
        }

    def environment(self, engine: Engine) -> dict[str, str]:
        return {"MAGIC": "1"}

    def assignment(
        self, workload: Workload, candidate: Candidate, world_size: int, device: Device = "cuda"
    ) -> Assignment:
        return Enchanted(workload, candidate, world_size, device)

    def trainer_arguments(self, training: EmittedTraining, config: str | Mapping[str, Any]) -> dict[str, Any]:
        return {"use_magic": training.world_size}

    def accelerate_config(self, training: EmittedTraining, config: str) -> dict[str, Any]:
        return {"distributed_type": "MAGIC"}

    def about_weights(self, training: EmittedTraining) -> tuple[str, str]:
        return "The weights were enchanted.\n", ""

    def export(self, program: str, training: EmittedTraining, config: str) -> Export | str:
        return "it knows no magic; use --for trainer" if program == "axolotl" else Export({"magic": True})


MADE_UP_BACKEND = MadeUpBackend()
