"""DeepSpeed as a backend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ladder.backends.base import Backend, Device, Moment, StepTerms
from ladder.backends.deepspeed.config import PIN_MEMORY, deepspeed_config, engine_knobs
from ladder.backends.deepspeed.moments import moments_of, offloaded
from ladder.backends.deepspeed.step_terms import step_terms
from ladder.candidates import Candidate, Engine, Rung
from ladder.machine.machine_speed import MachineSpeed
from ladder.workload.workload import Workload


class DeepSpeed(Backend):
    name = "deepspeed"
    rank_module = "ladder.trial.backends.deepspeed"

    def obstacle(self, workload: Workload, rung: Rung) -> str:
        """Quantised parameters cannot be offloaded: a partition is swapped as 16-bit numbers (partition_parameters.py),
        and bitsandbytes keeps what belongs to a packed matrix beside it. In 8 bits that is the whole matrix
        (`MatmulLtState.CB`), so that stage 3 divides nothing.
        """
        if workload.load_in == "8bit" and rung.stage == 3:
            return "stage 3 cannot divide 8-bit weights of bitsandbytes; --load-in 4bit can be divided"
        if workload.load_in is not None and rung.offload_param != "none":
            return "DeepSpeed offloads weights of 16 bits only; take a rung without param-cpu or param-nvme, as zero3"
        return ""

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
        return deepspeed_config(
            workload,
            engine,
            micro_batch=micro_batch,
            accumulation=accumulation,
            world_size=world_size,
            nvme_path=nvme_path,
        )

    def knobs(self, workload: Workload, engine: Engine) -> Mapping[str, bool | int]:
        return {PIN_MEMORY: True, **engine_knobs(workload, engine), **dict(engine.knobs)}

    def moments(self, workload: Workload, candidate: Candidate, world_size: int, device: Device) -> list[Moment]:
        return moments_of(workload, candidate, world_size, device)

    def host_bytes(self, workload: Workload, candidate: Candidate, world_size: int) -> tuple[float, float]:
        return offloaded(workload, candidate, world_size)

    def step_terms(self, workload: Workload, candidate: Candidate, world_size: int, machine: MachineSpeed) -> StepTerms:
        return step_terms(workload, candidate, world_size, machine)


DEEPSPEED = DeepSpeed()
