"""Sequence parallelism in a rank: each rank has a part of every sequence, attention sees the whole one.

The same as in accelerate and the Trainer with `sp_size` ranks per sequence (DeepSpeed's Ulysses, arXiv 2309.14509).
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
        """Make the attention of `model` exchange heads between all ranks in training; returns the groups for DeepSpeed.

        In evaluation each rank works alone, as with accelerate.
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
        # Shift before cutting: the label of a part's last token is the first token of the next part.
        following = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        parts = [each.chunk(dist.get_world_size(), dim=1)[dist.get_rank()] for each in (ids, following, positions)]
        ids, following, positions = (part.contiguous() for part in parts)
        return {"input_ids": ids, "labels": following, "shift_labels": following, "position_ids": positions}

    def whole_loss(self, loss: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The mean loss over all tokens of the sequences, from the mean over this rank's part; equal on all ranks."""
        # Every part but the last has as many labels as tokens.
        counted = (batch["labels"] != -100).sum()
        losses, counts = torch.stack(list(all_gather(loss))), torch.stack(list(all_gather(counted)))
        whole: torch.Tensor = (losses * counts).sum() / counts.sum()
        return whole

    def evaluation_batch(self, batch: dict[str, torch.Tensor], spec: TrialSpec) -> dict[str, torch.Tensor]:
        """The first part: each rank evaluates alone, and a whole sequence is usually too long for it."""
        return {name: part.chunk(spec.world_size, dim=1)[0] for name, part in batch.items()}


TECHNIQUE = Ulysses()
