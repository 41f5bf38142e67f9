"""What Adam and AdamW have in common."""

from __future__ import annotations

from typing import Any

from ladder.optimizers.base import Optimizer


class AdamFamily(Optimizer):
    """Two moments for each weight. With its states on the host, accelerate and DeepSpeed take DeepSpeed's own Adam."""

    deepspeed_type: str
    moments = 2
    host_operator = "cpu_adam"
    device_operator = "fused_adam"

    def deepspeed_section(self, learning_rate: float, *, offloaded: bool) -> dict[str, Any]:
        """Without offload it is torch's, fused, as trials have it: DeepSpeed's own would have to be compiled."""
        params: dict[str, Any] = {"lr": learning_rate, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
        if not offloaded:
            params |= {"torch_adam": True, "fused": True}
        return {"type": self.deepspeed_type, "params": params}
