"""The ways to hold a model for generating, the fastest first: a table, and why one cannot be tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ladder.backends.registry import MAIN
from ladder.candidates import Engine, Rung
from ladder.errors import UsageError
from ladder.machine.described import Machine
from ladder.machine.versions import is_within
from ladder.text import instead_of, shown
from ladder.workload.trained import LoadIn
from ladder.workload.workload import Workload

GENERATE = "generate"
"""What `--task` says for generating in place of training."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Prompts at once that are tried unless the user says which. Chosen: doubled as long as it pays."""
_TIERS = {"none": 1, "cpu": 2, "nvme": 3}
_QUANTISED: Mapping[LoadIn, dict[str, Any]] = {
    "8bit": {"load_in_8bit": True},
    "4bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
}


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to hold a model's weights; `title` follows "holds"."""

    name: str
    title: str
    spread: Literal["whole", "layers", "tensors", "parameters"] = "whole"
    """What is divided over the GPUs."""
    load_in: LoadIn | None = None
    rung: Rung | None = None
    """Of DeepSpeed: its stage 3, and where the parameters are."""
    own_prompts: bool = False
    """Each rank has a part of the prompts, of its own."""

    @property
    def tier(self) -> int:
        """How far weights travel for every token: not at all, from GPU to GPU (1), from the host (2), from a drive."""
        return _TIERS[self.rung.offload_param] if self.rung is not None else 0

    @property
    def is_alone(self) -> bool:
        """It has one device."""
        return self.spread == "whole" and not self.own_prompts

    def processes(self, world_size: int) -> int:
        """One lays layers over all GPUs; else every GPU that is used has a rank."""
        return 1 if self.is_alone or self.spread == "layers" else world_size

    def devices(self, world_size: int) -> int:
        return 1 if self.is_alone else world_size


def _of_stage_3(place: str, title: str) -> Way:
    """The main backend's rung with parameters in `place`, where nothing is optimised."""
    of_stage = (each for each in MAIN.rungs if each.stage == 3 and each.offload_param == place)
    rung = next(each for each in of_stage if each.offload_optimizer in ("none", place))
    name = "+".join(part for part in rung.name.split("+") if not part.startswith("opt-"))
    return Way(name=name, title=title, spread="parameters", rung=rung, own_prompts=True)


WAYS = (
    Way(name="one", title="the whole model on one device"),
    Way(name="copies", title="the whole model on every device", own_prompts=True),
    Way(name="8bit", title="the whole model on one device, linear layers in 8 bits", load_in="8bit"),
    Way(name="4bit", title="the whole model on one device, linear layers in 4 bits", load_in="4bit"),
    Way(name="layers", title="some of the layers on each GPU (device_map)", spread="layers"),
    Way(name="tp", title="a part of every matrix on each device (tensor parallel)", spread="tensors"),
    _of_stage_3("none", "a part of every parameter on each device (ZeRO stage 3)"),
    _of_stage_3("cpu", "parameters on the host (ZeRO stage 3 with offload)"),
    _of_stage_3("nvme", "parameters on a drive (ZeRO stage 3 with NVMe offload)"),
)
"""In the order in which they are tried."""
WAYS_BY_NAME = {way.name: way for way in WAYS}
WRITER = Way(name="weights", title="random weights for all ways")
"""Of the trial that writes them: each way loads the same weights, as it will load real ones."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What is generated, with what, and on what."""

    workload: Workload
    machine: Machine
    versions: Mapping[str, str]
    """Of the ranks' packages; empty for one that is not installed."""
    prompt_len: int
    new_tokens: int
    batches: tuple[int, ...] = ()
    """Empty for `BATCHES`."""
    asked: tuple[str, ...] = ()
    """The ways to try; empty for all."""
    load_in: LoadIn | None = None
    allow: tuple[str, ...] = ()


def sorted_out(problem: Generation) -> tuple[list[Way], dict[str, str]]:
    """The ways that can be tried, and by name why others cannot.

    UsageError for what no way can generate, for unknown ways, if no way can be tried or one that was asked for cannot.
    """
    _check(problem)
    ways = [way for way in WAYS if way.name in (problem.asked or WAYS_BY_NAME)]
    reasons = {way.name: reason for way in ways if (reason := _obstacle(way, problem))}
    if reasons and (problem.asked or len(reasons) == len(ways)):
        name, why = next(iter(reasons.items()))
        raise UsageError(f"--way {name}: {why}." if problem.asked else f"No way can be tried: {why}.")
    return [way for way in ways if way.name not in reasons], reasons


def _check(problem: Generation) -> None:
    model, name = problem.workload.model, shown(problem.workload.model.name)
    if model.task == "masked-lm":
        raise UsageError(f"{name} predicts masked tokens and has no head for generating; name one that writes text.")
    tokens = problem.prompt_len + (0 if model.is_encoder_decoder else problem.new_tokens)
    if model.max_positions is not None and max(tokens, problem.new_tokens) > model.max_positions:
        raise UsageError(
            f"--prompt-len {problem.prompt_len} and --new-tokens {problem.new_tokens} are more than the "
            f"{model.max_positions} positions {name} has; shorten one of them."
        )
    if strange := [each for each in problem.asked if each not in WAYS_BY_NAME]:
        raise UsageError(f"--way {shown(strange[0])} is unknown; {instead_of(strange[0], WAYS_BY_NAME)}")
    if unknown := [each for each in problem.allow if each not in _QUANTISED]:
        raise UsageError(f"--allow {shown(unknown[0])} has no effect with --task {GENERATE}; allow 8bit or 4bit.")


def _obstacle(way: Way, problem: Generation) -> str:
    """Why `way` cannot be tried, as far as is known before any trial; empty if it can."""
    held, machine, model = problem.load_in, problem.machine, problem.workload.model
    ranks = machine.world_size
    package = "bitsandbytes" if way.load_in else "deepspeed" if way.rung else "torch"
    if held is not None and way.load_in != held:
        return f"weights in {held} cannot be divided or offloaded: bitsandbytes keeps them on one GPU; omit --load-in"
    if (way.load_in or way.spread == "layers") and machine.device == "cpu":
        return "it needs a GPU"
    if way.load_in is not None and way.name not in (held, *problem.allow, *problem.asked):
        return f"it changes what is generated; --allow {way.name} tries it"
    if ranks == 1 and way.tier == 1:
        return "stage 3 on one rank without offload divides nothing; add GPUs, or put the parameters on the host"
    if ranks == 1 and way.tier == 0 and not way.is_alone:
        return "it needs several GPUs, and there is one"
    if way.spread == "tensors" and (model.num_heads % ranks or model.num_kv_heads % ranks):
        return f"{model.num_heads} heads, {model.num_kv_heads} of them with keys, cannot be divided over {ranks} ranks"
    if not batches_of(way, problem):
        return f"there are fewer prompts at once than {ranks} copies"
    if way.tier == _TIERS["nvme"] and machine.nvme_path is None:
        return "no --nvme-path was given"
    return "" if problem.versions[package] else f"{package} is not installed; `pip install {package}`"


def batches_of(way: Way, problem: Generation) -> tuple[int, ...]:
    """Those to try: in which each copy has a prompt, as one device alone is as fast with fewer."""
    least = problem.machine.world_size if way.own_prompts and way.rung is None else 1
    return tuple(batch for batch in problem.batches or BATCHES if batch >= least)


def from_pretrained(way: Way, problem: Generation) -> dict[str, Any]:
    """The arguments of `from_pretrained`, as JSON can say them."""
    dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[problem.workload.dtype]
    is_new = is_within(problem.versions["transformers"], ">=4.56")
    arguments: dict[str, Any] = {"dtype" if is_new else "torch_dtype": dtype}
    if way.spread == "layers":
        arguments["device_map"] = "auto"
    elif way.spread == "tensors":
        arguments["tp_plan"] = "auto"
    elif way.rung is None and problem.machine.device == "cuda":
        arguments["device_map"] = {"": 0}
    if way.load_in is not None:
        compute = {"bnb_4bit_compute_dtype": dtype} if way.load_in == "4bit" else {}
        arguments["quantization_config"] = _QUANTISED[way.load_in] | compute
    return arguments


def deepspeed_of(way: Way, problem: Generation, nvme_path: Path | None) -> dict[str, Any]:
    """DeepSpeed's configuration: that of a training's rung, without what trains; empty for a way without DeepSpeed."""
    if way.rung is None:
        return {}
    sizes = {"micro_batch": 1, "accumulation": 1, "world_size": problem.machine.world_size}
    config = MAIN.configuration(problem.workload, Engine(way.rung), nvme_path=nvme_path, **sizes)
    zero = config["zero_optimization"]
    zero.pop("offload_optimizer", None)
    if problem.machine.device == "cpu" and "offload_param" in zero:
        zero["offload_param"]["pin_memory"] = False  # there is no bus to cross
    return {name: value for name, value in config.items() if name != "gradient_clipping"}
