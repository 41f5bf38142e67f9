"""DeepSpeed as a backend."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ladder.backends.base import Backend, Choices, EmittedTraining, Flaw
from ladder.backends.deepspeed.config import PIN_MEMORY, deepspeed_config, engine_in, engine_knobs
from ladder.backends.deepspeed.knobs import knob_choices, knobs_in_doubt
from ladder.backends.deepspeed.rungs import LEAN_KNOBS, NAME, RUNGS
from ladder.backends.deepspeed.step import Zero
from ladder.candidates import Candidate, Engine, Export, Rung, Technique
from ladder.optimizers.base import WrongAtStage
from ladder.optimizers.registry import OPTIMIZERS
from ladder.step.assignment import Assignment
from ladder.step.counted import Device
from ladder.workload.script import can_be_offloaded, changed_by_flattening, replaced_by_offload
from ladder.workload.workload import OptimizerName, Workload

_FLAWS = (
    Flaw(
        "deepspeed",
        ">=0.17.6,<0.18.3",
        "loses the gradients of all but the last micro-step at stage 2 (DeepSpeed issue 7718)",
        lambda workload, rung: rung.stage == 2,
    ),
    Flaw(
        "deepspeed",
        "==0.19.0",
        "diverges where accelerate drives it (its losses differ from those of torch's DDP)",
        lambda workload, rung: workload.script is None or workload.script.facts.kind != "deepspeed",
    ),
)
"""Found by comparing losses."""


def _at_its_stage(wrong: WrongAtStage) -> Flaw:
    return Flaw("deepspeed", wrong.versions, wrong.why, lambda workload, rung: rung.stage == wrong.stage)


class DeepSpeed(Backend):
    name = NAME
    rank_module = "ladder.trial.backends.deepspeed"
    rungs = RUNGS
    option = NAME
    package = "deepspeed"
    one_rank_needs_no_stage = True

    def title(self, rung: Rung) -> str:
        return f"ZeRO-{rung.stage}{' in small buffers' if rung.knobs == LEAN_KNOBS else ''}"

    def flaws(self, workload: Workload) -> tuple[Flaw, ...]:
        return (*map(_at_its_stage, OPTIMIZERS[workload.optimizer].wrong_at), *_FLAWS)

    def obstacle(self, workload: Workload, rung: Rung) -> str:
        """Offload would replace most optimizers by another one, and ZeRO has one long tensor of many weights.

        Quantised parameters cannot be offloaded: a partition is swapped as 16-bit numbers (partition_parameters.py),
        and bitsandbytes keeps what belongs to a packed matrix beside it. In 8 bits that is the whole matrix
        (`MatmulLtState.CB`), so that stage 3 divides nothing.
        """
        offloads, script = rung.offload_optimizer != "none", workload.script
        if script is None and (why := OPTIMIZERS[workload.optimizer].obstacle(rung.stage, offloaded=offloads)):
            return why
        if script is not None and offloads and not can_be_offloaded(script.facts):
            return replaced_by_offload(script.facts.optimizer)
        if script is not None and rung.stage > 0 and script.facts.counted and script.facts.counted.by_shape:
            return changed_by_flattening(script.facts.optimizer)
        if workload.load_in == "8bit" and rung.stage == 3:
            return "stage 3 cannot divide 8-bit weights of bitsandbytes; --load-in 4bit can be divided"
        if workload.load_in is not None and rung.offload_param != "none":
            return "DeepSpeed offloads weights of 16 bits only; take a rung without param-cpu or param-nvme, as zero3"
        return ""

    def operators(self, rung: Rung, optimizer: OptimizerName) -> tuple[str, ...]:
        on_disk = ("async_io",) if "nvme" in rung.devices else ()
        on_host = OPTIMIZERS[optimizer].host_operator if rung.offload_optimizer != "none" else ""
        return (*on_disk, on_host) if on_host else on_disk

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

    def engine_in(
        self, config: Mapping[str, Any], workload: Workload, world_size: int, techniques: tuple[Technique, ...]
    ) -> Engine:
        return engine_in(config["zero_optimization"], workload, world_size, techniques)

    def knobs(self, workload: Workload, engine: Engine, world_size: int) -> Mapping[str, bool | int]:
        return {PIN_MEMORY: True, **engine_knobs(workload, engine, world_size), **dict(engine.knobs)}

    def knob_choices(self, workload: Workload, engine: Engine, world_size: int) -> Choices:
        return knob_choices(workload, engine.rung, world_size)

    def knobs_in_doubt(self, candidate: Candidate, world_size: int, device: Device) -> Mapping[str, bool | int]:
        return knobs_in_doubt(candidate, world_size, device)

    def assignment(
        self, workload: Workload, candidate: Candidate, world_size: int, device: Device = "cuda"
    ) -> Assignment:
        return Zero(workload, candidate, world_size, device)

    def for_file(
        self, config: dict[str, Any], workload: Workload, rung: Rung, device: str, learning_rate: float | None
    ) -> dict[str, Any]:
        if device == "cpu" and rung.stage == 3:
            # On the CPU, transformers builds the model in shards before DeepSpeed knows the other ranks, and DeepSpeed
            # then compares this number with a single rank. The other two batch settings contain the same information.
            config.pop("train_batch_size", None)
        if learning_rate is None:
            return config
        optimizer = OPTIMIZERS[workload.optimizer]
        return config | {
            "optimizer": optimizer.deepspeed_section(learning_rate, offloaded=rung.offload_optimizer != "none")
        }

    def trainer_arguments(self, training: EmittedTraining, config: str | Mapping[str, Any]) -> dict[str, Any]:
        return {"deepspeed": config}

    def accelerate_config(self, training: EmittedTraining, config: str) -> dict[str, Any]:
        """accelerate refuses a file that also sets mixed precision, accumulation, clipping, stage or offload."""
        return {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {
                "deepspeed_config_file": config,
                # Stage 3 builds the model in shards, because the whole model may not fit on a rank.
                "zero3_init_flag": training.rung.stage == 3,
                # Without this, accelerate has DeepSpeed start the other nodes by pdsh.
                **({"deepspeed_multinode_launcher": "standard"} if training.num_nodes > 1 else {}),
            },
        }

    def launch_options(self, training: EmittedTraining, config: str) -> str:
        return f"--deepspeed_config_file {shlex.quote(config)}"

    def export(self, program: str, training: EmittedTraining, config: str) -> Export | str:
        return Export({"deepspeed": config} if program == "axolotl" else {})


DEEPSPEED = DeepSpeed()
