"""Training without DeepSpeed in a rank: DDP and FSDP2, as accelerate and the Trainer do it."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers import PreTrainedModel

from ladder.backends.plain.config import FSDP
from ladder.events.protocol import TrialSpec
from ladder.trial.backends import RankBackend
from ladder.trial.model import DTYPES, make_optimizer
from ladder.trial.partly import save_and_load_adapters
from ladder.trial.techniques import divides_gradients, precision_of, techniques_of
from ladder.trial.wrapping import wrap


class PlainTraining:
    skipped_steps = 0
    """Of bf16 none: only fp16 overflows."""

    def __init__(self, accelerator: Accelerator, model: Any, optimizer: Any, spec: TrialSpec) -> None:
        self._accelerator, self._spec = accelerator, spec
        self._model, self._optimizer = model, optimizer
        self._is_boundary = True
        self._unsynchronised: AbstractContextManager[Any] = nullcontext()

    def begin(self, *, is_boundary: bool) -> None:
        self._is_boundary = is_boundary

    def __call__(self, **batch: Any) -> Any:
        if not self._model.training:
            return self._model(**batch)
        # Forward decides whether DDP reduces in backward, so the block ends with the micro-step.
        reduces = self._is_boundary or divides_gradients(self._spec)
        self._unsynchronised = nullcontext() if reduces else self._accelerator.no_sync(self._model)
        self._unsynchronised.__enter__()
        return self._model(**batch)

    def backward(self, loss: torch.Tensor) -> None:
        self._accelerator.backward(loss)  # which divides by the accumulation
        self._unsynchronised.__exit__(None, None, None)

    def step(self) -> None:
        if not self._is_boundary:
            return
        if clipping := self._spec.deepspeed["gradient_clipping"]:
            self._accelerator.clip_grad_norm_(self._model.parameters(), clipping)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def eval(self) -> None:
        self._model.eval()

    def train(self) -> None:
        self._model.train()

    def gather(self, save_folder: str | None) -> None:
        gathered = self._accelerator.get_state_dict(self._model)
        # What is compiled has another name.
        weights = {name.replace("_orig_mod.", ""): each for name, each in gathered.items()}
        model = self._accelerator.unwrap_model(self._model, keep_torch_compile=False)
        if self._spec.lora is not None:
            save_and_load_adapters(model, weights, save_folder)
        elif save_folder is not None and self._accelerator.is_main_process:
            model.save_pretrained(save_folder, state_dict=weights)


class Plain(RankBackend):
    def weights_type(self, spec: TrialSpec) -> torch.dtype:
        """Frozen weights beside adapters need no fp32 masters."""
        return torch.float32 if spec.lora is None else DTYPES[spec.dtype]

    def build_device(self, spec: TrialSpec) -> str:
        """With FSDP2 rank 0 alone has all weights, on its host, and sends them to the others, as of a checkpoint."""
        if FSDP not in spec.deepspeed:
            return spec.device
        sends = spec.deepspeed[FSDP]["cpu_ram_efficient_loading"] and dist.get_rank() > 0
        return "meta" if sends else "cpu"

    def collectives(self, spec: TrialSpec) -> str:
        """As accelerate's launcher has it for FSDP: NCCL cannot reduce the norm of gradients that lie on the host."""
        if FSDP in spec.deepspeed and spec.device == "cuda":
            return "cpu:gloo,cuda:nccl"
        return super().collectives(spec)

    def start(self, model: PreTrainedModel, spec: TrialSpec) -> PlainTraining:
        optimizer = make_optimizer(spec, model)
        for technique in techniques_of(spec):
            technique.check_optimizer(optimizer)
        accelerator = _accelerator(spec)
        wrapped, prepared = accelerator.prepare(model, optimizer)
        return PlainTraining(accelerator, wrapped, prepared, spec)

    def divides_weights(self, spec: TrialSpec) -> bool:
        return FSDP in spec.deepspeed

    def take_hold(self, spec: TrialSpec) -> None:
        _allow_on_cpu(spec)

    def accelerator_options(self, spec: TrialSpec) -> dict[str, Any]:
        return {**super().accelerator_options(spec), "fsdp_plugin": _plugin(spec)}


def _accelerator(spec: TrialSpec) -> Accelerator:
    accumulation, on_cpu = spec.deepspeed["gradient_accumulation_steps"], spec.device == "cpu"
    # accelerate knows no groups of CPU ranks, where torch has them; so a test on a CPU can run the same code.
    in_groups = on_cpu and os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", "") == "true"
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision=precision_of(spec),
        gradient_accumulation_steps=accumulation,
        fsdp_plugin=_plugin(spec),
    )
    if in_groups:
        from accelerate.parallelism_config import ParallelismConfig  # which it has since 1.10

        accelerator.state.parallelism_config = sizes = ParallelismConfig()  # of the environment
        accelerator.state.device_mesh = sizes.get_device_mesh("cpu")
    return accelerator


def _plugin(spec: TrialSpec) -> FullyShardedDataParallelPlugin | None:
    """The plugin that `spec` says, as the emitted files and the Trainer's arguments make it; None for another engine.

    From now on accelerate takes it on CPU ranks too, if `spec` is of these.
    """
    if FSDP not in spec.deepspeed:
        return None
    _allow_on_cpu(spec)
    return FullyShardedDataParallelPlugin(**spec.deepspeed[FSDP])


def _allow_on_cpu(spec: TrialSpec) -> None:
    """Let accelerate shard on CPU ranks, where it ignores FSDP and torch has it; nothing changes on GPUs."""
    if spec.device != "cpu" or FSDP not in spec.deepspeed or hasattr(AcceleratorState.__init__, "__wrapped__"):
        return

    def made(own: Any, state: Any, *arguments: Any, **options: Any) -> None:
        own(state, *arguments, **options)
        plugin = options.get("fsdp_plugin")
        if plugin is None or state.distributed_type != DistributedType.MULTI_CPU:
            return
        if state._mixed_precision != "no":  # as accelerate has it on GPUs
            plugin.set_mixed_precision(state._mixed_precision)
        state.fsdp_plugin = plugin
        state.distributed_type = DistributedType.FSDP
        PartialState().distributed_type = DistributedType.FSDP  # every further look at the state takes it from there

    wrap(AcceleratorState, "__init__", made)


BACKEND = Plain()
