"""SGD without momentum, which keeps nothing for a weight."""

from __future__ import annotations

from typing import Any

from ladder.optimizers.base import Optimizer, WrongAtStage


class Sgd(Optimizer):
    name = "sgd"
    rank_module = "ladder.trial.optimizers.sgd"
    moments = 0
    wrong_at = (  # found by comparing losses
        WrongAtStage("<0.19.6", 3, "trains wrongly with SGD at stage 3 (its losses differ from those of stage 1)"),
    )
    in_torch = "torch.optim.SGD(…)"
    trainer_names = ("sgd",)
    offloaded_names = ("sgd",)
    clipping_of_comparison = 1.0  # without clipping its steps may be too short to see or too long to compare

    def trainer_arguments(self) -> dict[str, Any]:
        return {"optim": "sgd"}

    def deepspeed_settings(self) -> dict[str, Any]:
        """DeepSpeed does not list it as tested with ZeRO."""
        return {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}

    def deepspeed_section(self, learning_rate: float, *, offloaded: bool) -> dict[str, Any]:
        return {"type": "SGD", "params": {"lr": learning_rate}}


SGD = Sgd()
