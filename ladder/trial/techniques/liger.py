"""Liger's kernels in a rank."""

from __future__ import annotations

from transformers import PreTrainedModel

from ladder.trial.techniques import RankTechnique


class Liger(RankTechnique):
    evaluation_arguments = {"skip_logits": True}  # noqa: RUF012
    can_be_followed = True

    def change_model(self, model: PreTrainedModel) -> None:
        """As the Trainer's `use_liger_kernel` does. RuntimeError if that would silently have no effect."""
        from transformers.integrations.liger import apply_liger_kernel  # imports Triton, which other ranks do not need

        apply_liger_kernel(model, None)
        if "forward" not in vars(model):
            raise RuntimeError(f"liger-kernel has no fused loss for {type(model).__name__}")


TECHNIQUE = Liger()
