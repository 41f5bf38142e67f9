"""The ways to hold a model for generating, the fastest first: a table, and why one cannot be tried."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ladder.backends.registry import MAIN
from ladder.candidates import Rung
from ladder.errors import UsageError
from ladder.text import instead_of, shown
from ladder.workload.trained import LoadIn
from ladder.workload.workload import ModelShape, Workload

GENERATE = "generate"
"""What `--task` says for generating in place of training."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Prompts at once that are tried unless the user says which. Chosen: doubled as long as it pays."""
_HIGHEST_TIER = {"none": 1, "cpu": 2, "nvme": 3}


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to hold a model's weights."""

    name: str
    title: str
    """To follow "holds"."""
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
        return _HIGHEST_TIER[self.rung.offload_param] if self.rung is not None else 0

    @property
    def is_alone(self) -> bool:
        """It has one device."""
        return self.spread == "whole" and not self.own_prompts

    @property
    def is_exact(self) -> bool:
        """It computes with the weights as they are, and so has the tokens of any other exact way."""
        return self.load_in is None

    def processes(self, world_size: int) -> int:
        """One process lays layers over all GPUs; else every GPU that is used has a rank."""
        return 1 if self.is_alone or self.spread == "layers" else world_size

    def devices(self, world_size: int) -> int:
        return 1 if self.is_alone else world_size

    def prompts_of_a_rank(self, batch: int, world_size: int) -> int:
        """The most that a rank has of `batch` prompts."""
        return -(-batch // world_size) if self.own_prompts else batch


def _of_stage_3(place: str, title: str) -> Way:
    """With the parameters in `place`: the main backend's rung for it, where nothing is optimised."""
    rung = next(
        each
        for each in MAIN.rungs
        if each.stage == 3 and each.offload_param == place and each.offload_optimizer in ("none", place)
    )
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


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What is generated, with what, and on what."""

    workload: Workload
    """Its model, task and precision."""
    prompt_len: int
    new_tokens: int
    batches: tuple[int, ...] = BATCHES
    asks_batches: bool = False
    """The user said which."""
    asked: tuple[str, ...] = ()
    """The ways to try; empty for all."""
    load_in: LoadIn | None = None
    """How the user wants the weights held."""
    allow: tuple[str, ...] = ()
    world_size: int
    device: Literal["cuda", "cpu"]
    memory_limit: int
    host_memory: int
    has_nvme: bool = False
    missing: Mapping[str, str] = field(default_factory=dict)
    """By package that is not installed for the ranks: what to do about it."""

    @property
    def model(self) -> ModelShape:
        return self.workload.model


def ways_named(names: Collection[str]) -> list[Way]:
    """The ways of these names, in the table's order; all of them for no name. UsageError for an unknown one."""
    known = [way.name for way in WAYS]
    for name in names:
        if name not in known:
            raise UsageError(f"--way {shown(name)} is unknown; {instead_of(name, known)}")
    return [way for way in WAYS if not names or way.name in names]


def check(problem: Generation) -> None:
    """UsageError for what no way can generate, in one sentence."""
    model, name = problem.model, shown(problem.model.name)
    if model.task == "masked-lm":
        raise UsageError(
            f"{name} predicts masked tokens and has no head for generating; name a model that writes text."
        )
    tokens = problem.prompt_len if model.is_encoder_decoder else problem.prompt_len + problem.new_tokens
    most = model.max_positions
    if most is not None and max(tokens, problem.new_tokens) > most:
        raise UsageError(
            f"--prompt-len {problem.prompt_len} and --new-tokens {problem.new_tokens} are more than the {most} "
            f"positions {name} has; shorten one of them."
        )
    unknown = [name for name in problem.allow if name not in _quantised()]
    if unknown:
        raise UsageError(
            f"--allow {shown(unknown[0])} has no effect with --task {GENERATE}; what it can allow is 8bit and 4bit."
        )


def _quantised() -> dict[str, Way]:
    return {way.name: way for way in WAYS if way.load_in is not None}


def sorted_out(problem: Generation) -> tuple[list[Way], dict[str, str]]:
    """The ways that can be tried, and by name why others cannot. UsageError if none can, or one of those asked for."""
    check(problem)
    possible, reasons = [], dict[str, str]()
    for way in ways_named(problem.asked):
        reason = obstacle(way, problem)
        if reason and problem.asked:
            raise UsageError(f"--way {way.name}: {reason}.")
        if reason:
            reasons[way.name] = reason
        else:
            possible.append(way)
    if not possible:
        raise UsageError(f"No way is left to try: {'; '.join(f'{name}: {why}' for name, why in reasons.items())}.")
    return possible, reasons


def obstacle(way: Way, problem: Generation) -> str:
    """Why `way` cannot be tried, as far as is known before any trial; empty if it can."""
    return _of_quantised(way, problem) or _of_spread(way, problem) or _of_stage(way, problem)


def _of_quantised(way: Way, problem: Generation) -> str:
    held = problem.load_in
    if held is not None and way.load_in != held:
        moved = "divided or kept on the host" if way.rung is not None else "held so"
        return f"weights in {held} cannot be {moved}, as bitsandbytes keeps them whole on one GPU; leave --load-in out"
    if way.load_in is None:
        return ""
    if problem.device == "cpu":
        return "bitsandbytes' packed weights need a GPU"
    if "bitsandbytes" in problem.missing:
        return problem.missing["bitsandbytes"]
    if way.load_in not in (held, *problem.allow) and way.name not in problem.asked:
        return f"it changes what is generated; --allow {way.name} tries it"
    return ""


def _of_spread(way: Way, problem: Generation) -> str:
    ranks, model = problem.world_size, problem.model
    if way.is_alone or way.tier > 1:
        return ""
    if ranks == 1:
        many = (
            "stage 3 on one rank without offload divides nothing" if way.rung is not None else "it needs several GPUs"
        )
        return f"{many}, and there is one; add GPUs or put the parameters on the host (--way {WAYS[-2].name})"
    if way.spread == "layers" and problem.device == "cpu":
        return "layers are laid over GPUs, and there is none"
    if way.spread == "tensors" and (model.num_heads % ranks or model.num_kv_heads % ranks):
        return f"{model.num_heads} heads, {model.num_kv_heads} of them with keys, cannot be divided over {ranks} ranks"
    if way.spread == "whole" and max(problem.batches) < ranks:
        return f"there are fewer prompts at once than {ranks} copies"
    return ""


def _of_stage(way: Way, problem: Generation) -> str:
    if way.rung is None:
        return ""
    if "deepspeed" in problem.missing:
        return problem.missing["deepspeed"]
    return "no --nvme-path was given" if way.rung.offload_param == "nvme" and not problem.has_nvme else ""


def from_pretrained(way: Way, problem: Generation, *, dtype_key: str) -> dict[str, Any]:
    """The arguments of `from_pretrained`, but for what is quantised. Layers and devices as JSON can say them."""
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    arguments: dict[str, Any] = {dtype_key: names[problem.workload.dtype]}
    if way.spread == "layers":
        arguments["device_map"] = "auto"
    elif way.spread == "tensors":
        arguments["tp_plan"] = "auto"
    elif way.rung is None and problem.device == "cuda":
        arguments["device_map"] = {"": 0}
    return arguments


def quantisation(way: Way, problem: Generation, *, dtype: str) -> dict[str, Any] | None:
    """The arguments of BitsAndBytesConfig: LLM.int8, or NF4 with double quantisation; None for weights as they are."""
    if way.load_in is None:
        return None
    if way.load_in == "8bit":
        return {"load_in_8bit": True}
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": dtype,
    }
