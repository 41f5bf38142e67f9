"""DDP and FSDP2 in the words of accelerate's file, of the Trainer and of the programs that are built on it."""

from __future__ import annotations

from typing import Any

from ladder.backends.base import EmittedTraining
from ladder.backends.plain.config import one_rank_loads
from ladder.candidates import Export
from ladder.workload.workload import mixed_precision


def trainer_arguments(training: EmittedTraining) -> dict[str, Any]:
    """DDP is what the Trainer does with several ranks."""
    return {"fsdp": True, "fsdp_config": _sharding(training, "cpu_offload")} if training.rung.stage else {}


def accelerate_config(training: EmittedTraining) -> dict[str, Any]:
    """The precision, and FSDP2's settings."""
    said: dict[str, Any] = {"mixed_precision": mixed_precision(training.dtype)}
    if training.rung.stage:
        words = {f"fsdp_{name}": value for name, value in _sharding(training, "offload_params").items()}
        return {"distributed_type": "FSDP", "fsdp_config": words, **said}
    of_several = "MULTI_CPU" if training.device == "cpu" else "MULTI_GPU"
    return {"distributed_type": of_several if training.world_size > 1 else "NO", **said}


def about_weights(training: EmittedTraining) -> tuple[str, str]:
    """What is trained has fp32 masters; and FSDP2 divides only floating-point parameters."""
    held, load_in = "fp32 (from_pretrained(…, dtype=torch.float32))", training.load_in
    if training.lora is not None:
        held = "16 bits beside adapters" if load_in is None else f"{load_in[0]} bits beside adapters"
        held += ", and all others in fp32 (peft.prepare_model_for_kbit_training)" if training.prepare_kbit else ""
    packed = ""
    if load_in is not None and training.rung.stage:
        packed = (
            "\nIts BitsAndBytesConfig needs bnb_4bit_quant_storage=torch.bfloat16: otherwise FSDP2 divides no weight."
        )
    return f"The weights were in {held}; the script must load its model so.\n", packed


def export(program: str, training: EmittedTraining) -> Export | str:
    """TRL trains weights in the type in which it loads them. axolotl has a version beside FSDP2's settings.

    axolotl calls peft.prepare_model_for_kbit_training, and then makes norms, embeddings and head 16 bits again; TRL and
    LLaMA-Factory do not call it.
    """
    if training.prepare_kbit and program in ("trl", "axolotl", "llama-factory"):
        return "it holds weights that are not packed in 16 bits, and they were measured in fp32; use --for trainer"
    if program == "trl":
        return Export({"dtype": "float32" if training.lora is None else "bfloat16"})
    if program != "axolotl":
        return Export({})
    if training.lora is None:
        return (
            "it loads 16-bit weights, and without DeepSpeed trains them without the fp32 masters that were measured; "
            "use --for trl, llama-factory or trainer"
        )
    if not training.rung.stage:
        return Export({})
    words = {name: value for name, value in _sharding(training, "offload_params").items() if name != "version"}
    return Export({"fsdp_version": 2, "fsdp_config": words})


def _sharding(training: EmittedTraining, offload: str) -> dict[str, Any]:
    """FSDP2's settings; accelerate and the Trainer have other words for `offload`."""
    return {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": training.rung.stage == 3,
        offload: training.rung.offload_param == "cpu",
        "state_dict_type": "FULL_STATE_DICT",
        "cpu_ram_efficient_loading": one_rank_loads(training.load_in, training.techniques),
    }
