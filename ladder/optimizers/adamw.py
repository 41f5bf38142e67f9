"""AdamW: Adam with weight decay that is decoupled from the gradient."""

from __future__ import annotations

from typing import Any

from ladder.optimizers.adam_family import AdamFamily


class AdamW(AdamFamily):
    name = "adamw"
    rank_module = "ladder.trial.optimizers.adamw"
    deepspeed_type = "AdamW"
    in_torch = "torch.optim.AdamW(…, fused=True)"
    on_host = "deepspeed.ops.adam.DeepSpeedCPUAdam(…, adamw_mode=True)"
    in_8_bits = "AdamW8bit"
    trainer_names = ("adamw_torch", "adamw_torch_fused", "adamw_hf")
    offloaded_names = ("adamw", "adamw_torch", "adamw_torch_fused")

    def trainer_arguments(self) -> dict[str, Any]:
        """If the optimizer is offloaded, accelerate replaces torch's by DeepSpeedCPUAdam."""
        return {"optim": "adamw_torch_fused"}


ADAMW = AdamW()
