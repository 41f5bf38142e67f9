"""Adam: two moments, and no weight decay in the emitted files."""

from __future__ import annotations

from typing import Any

from ladder.optimizers.adam_family import AdamFamily


class Adam(AdamFamily):
    name = "adam"
    rank_module = "ladder.trial.optimizers.adam"
    deepspeed_type = "Adam"
    in_torch = "torch.optim.Adam(…, fused=True)"
    on_host = "deepspeed.ops.adam.DeepSpeedCPUAdam(…, adamw_mode=False)"
    in_8_bits = "Adam8bit"
    offloaded_names = ("adam",)

    def trainer_arguments(self) -> dict[str, Any]:
        """The Trainer has no plain Adam; AdamW without weight decay is the same."""
        return {"optim": "adamw_torch_fused", "weight_decay": 0.0}

    def deepspeed_section(self, learning_rate: float, *, offloaded: bool) -> dict[str, Any]:
        section = super().deepspeed_section(learning_rate, offloaded=offloaded)
        section["params"]["adam_w_mode"] = False
        return section


ADAM = Adam()
