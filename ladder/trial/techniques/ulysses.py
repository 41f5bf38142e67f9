"""Sequences that all ranks share: each has a part of them, attention sees the whole, and the loss is one.

As accelerate and the Trainer do it with `sp_size` ranks to a sequence (DeepSpeed's Ulysses, arXiv 2309.14509).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_gather
from transformers import PreTrainedModel

from ladder.events.protocol import TrialSpec
from ladder.trial.techniques import RankTechnique


class Ulysses(RankTechnique):
    def process_groups(self, model: PreTrainedModel, spec: TrialSpec) -> Any:
        """Let the attention of `model` exchange its heads between all ranks in training; the groups for DeepSpeed.

        Evaluation stays each rank's own, as under accelerate.
        """
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        return UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation="sdpa",
            sequence_parallel_size=spec.world_size,
            micro_batch_size=spec.candidates[0].micro_batch,
            disable_in_eval=True,
        )

    def own_batch(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's part, [micro_batch, seq_len / ranks], of a batch that is the same on all ranks."""
        ids = batch["input_ids"]
        # Shifted before they are cut: the last token of a part is followed by the first one of the next.
        following = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        parts = [each.chunk(dist.get_world_size(), dim=1)[dist.get_rank()] for each in (ids, following, positions)]
        ids, following, positions = (part.contiguous() for part in parts)
        return {"input_ids": ids, "labels": following, "shift_labels": following, "position_ids": positions}

    def whole_loss(self, loss: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The mean over all tokens of the sequences, the same on every rank, of the mean over this rank's part."""
        # Every part but the last has as many labels as tokens.
        counted = (batch["labels"] != -100).sum()
        losses, counts = torch.stack(list(all_gather(loss))), torch.stack(list(all_gather(counted)))
        whole: torch.Tensor = (losses * counts).sum() / counts.sum()
        return whole

    def evaluation_batch(self, batch: dict[str, torch.Tensor], spec: TrialSpec) -> dict[str, torch.Tensor]:
        """As long as a rank's part: a whole one is each rank's own then, and mostly more than it has room for."""
        return {name: part.chunk(spec.world_size, dim=1)[0] for name, part in batch.items()}


TECHNIQUE = Ulysses()
