"""The evaluation that a proof runs: as the Trainer's own, but no longer than it takes to see its memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import Trainer

from ladder.trial.script.samples import Samples

_BATCHES = 32
"""Of a rank. Chosen: the longest ones come first, and hold the most; more of them only settle what is allocated."""


def evaluate(trainer: Trainer) -> None:
    """Run the Trainer's own evaluation, on the longest samples where they are enough.

    With `compute_metrics` it runs whole: then what the model says of each sample stays in memory until the end.
    """
    datasets = trainer.eval_dataset
    if trainer.compute_metrics is not None:
        trainer.evaluate()
    elif isinstance(datasets, Mapping):
        trainer.evaluate({name: longest_of(trainer, each) for name, each in datasets.items()})
    else:
        trainer.evaluate(longest_of(trainer, datasets))


def longest_of(trainer: Trainer, dataset: Any) -> Any:
    """The longest samples of `dataset`, longest first, for so many batches; all of it where it has no more."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):  # a stream
        return dataset
    count = _BATCHES * trainer.args.eval_batch_size * trainer.args.world_size
    if len(dataset) <= count:
        return dataset
    chosen = [Samples(trainer.get_eval_dataloader(dataset)).longest_first[:count]]
    if torch.distributed.is_initialized():  # a rank may have looked at other samples of a slow data set
        torch.distributed.broadcast_object_list(chosen, src=0)
    getattr(trainer, "_eval_dataloaders", {}).clear()  # the Trainer would keep the whole one, with lasting workers
    (indices,) = chosen
    # A data set of `datasets` stays one, so that the Trainer leaves out its unused columns.
    return dataset.select(indices) if hasattr(dataset, "select") else torch.utils.data.Subset(dataset, indices)
