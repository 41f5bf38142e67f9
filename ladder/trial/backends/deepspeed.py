"""DeepSpeed in a rank."""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

import accelerate.accelerator
import deepspeed
import torch
from accelerate import PartialState
from accelerate.utils import DeepSpeedPlugin
from transformers import PreTrainedModel

from ladder.events.protocol import TrialSpec
from ladder.trial.backends import RankBackend
from ladder.trial.model import DTYPES, forget_steps, make_optimizer
from ladder.trial.partly import save_and_load_adapters
from ladder.trial.techniques import techniques_of
from ladder.trial.wrapping import wrap
from ladder.workload.script import replaced_by_offload

_LEAVES_HOOKS = 3
"""The stage of ZeRO whose engine is not freed (measured: its model outlives `destroy` and a garbage collection)."""


class ReplacedOptimizerError(RuntimeError):
    """A script's optimizer would become another one without a word."""

    is_sentence = True


class DeepSpeedTraining:
    def __init__(self, engine: Any, spec: TrialSpec) -> None:
        self._engine, self._spec = engine, spec

    @property
    def skipped_steps(self) -> int:
        return int(self._engine.skipped_steps)

    def begin(self, *, is_boundary: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_boundary)

    def __call__(self, **batch: Any) -> Any:
        return self._engine(**batch)

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss)

    def step(self) -> None:
        self._engine.step()

    def eval(self) -> None:
        self._engine.eval()

    def train(self) -> None:
        self._engine.train()

    def gather(self, save_folder: str | None) -> None:
        if self._spec.lora is not None:
            save_and_load_adapters(self._engine.module, self._gathered(only_trained=True), save_folder)
        elif save_folder is not None:
            self._engine.save_16bit_model(save_folder)
        else:
            self._gathered()

    def let_go(self) -> None:
        """End what DeepSpeed keeps beside the engine."""
        self._engine.destroy()

    def _gathered(self, *, only_trained: bool = False) -> Any:
        """The weights on rank 0's host."""
        if self._engine.zero_optimization_partition_weights():
            # save_16bit_model calls this before it writes; there is no public way to gather without writing.
            return self._engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=only_trained)
        return self._engine.module_state_dict(exclude_frozen_parameters=only_trained)


class DeepSpeed(RankBackend):
    def weights_type(self, spec: TrialSpec) -> torch.dtype:
        return DTYPES[spec.dtype]

    def build_device(self, spec: TrialSpec) -> str:
        return "cpu" if spec.zero_stage == 3 else spec.device

    def join(self, spec: TrialSpec) -> None:
        # On the CPU it would compile an operator (25 s on two cores) that only `inference_all_reduce` uses.
        import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
        if not spec.deepspeed.get("compile", {}).get("deepcompile"):
            # Every engine would import inductor for this: 1.0 s, or 2.4 s without .pyc files (measured on H100s).
            deepspeed.DeepSpeedEngine.register_compile_pass = lambda *_, **__: None
        deepspeed.init_distributed(dist_backend=self.collectives(spec), verbose=False)

    def start(self, model: PreTrainedModel, spec: TrialSpec) -> DeepSpeedTraining:
        techniques = techniques_of(spec)
        made = (technique.process_groups(model, spec) for technique in techniques)
        groups = next((each for each in made if each is not None), None)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=make_optimizer(spec, model), config=spec.deepspeed, mpu=groups
        )
        for technique in techniques:
            technique.check_optimizer(engine.basic_optimizer)
        if spec.parity:
            forget_steps(engine.optimizer)
        return DeepSpeedTraining(engine, spec)

    def can_be_followed(self, spec: TrialSpec) -> bool:
        """Hooks of stage 3 keep the engine (deepspeed 0.19.8); torch keeps what was pinned for offload."""
        offloads = any(name.startswith("offload_") for name in spec.deepspeed["zero_optimization"])
        offloads |= any(candidate.offload_activations for candidate in spec.candidates)
        return spec.zero_stage < _LEAVES_HOOKS and not offloads

    def let_go(self, training: DeepSpeedTraining) -> None:
        training.let_go()

    def divides_weights(self, spec: TrialSpec) -> bool:
        """Stage 3 gathers all parameters in one type."""
        return spec.zero_stage == 3

    def take_hold(self, spec: TrialSpec) -> None:
        """accelerate puts DeepSpeed's Adam in the place of any optimizer whose states go to the host."""

        def mapped(own: Any, optimizer: torch.optim.Optimizer) -> Any:
            if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):  # what derives from them may do more
                raise ReplacedOptimizerError(replaced_by_offload(type(optimizer).__name__))
            return own(optimizer)

        wrap(accelerate.accelerator, "map_pytorch_optim_to_deepspeed", mapped)

    def accelerator_options(self, spec: TrialSpec) -> dict[str, Any]:
        """`cpu=True` would leave DeepSpeed out; asked for beforehand, it says how ranks find each other, no more."""
        PartialState(cpu=spec.device == "cpu")
        plugin = DeepSpeedPlugin(hf_ds_config=copy.deepcopy(spec.deepspeed))
        return {"cpu": False, "deepspeed_plugin": plugin, "fsdp_plugin": None}


BACKEND = DeepSpeed()
