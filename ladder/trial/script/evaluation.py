"""The evaluation that a proof runs: as the Trainer's own, but no longer than it takes to see its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import Trainer

from ladder.trial.script.samples import Samples

_BATCHES = 32
"""Of a rank. Chosen: the longest ones come first, and hold the most; more of them only settle what is allocated."""


def evaluate(
    trainer: Trainer, batches: int = _BATCHES, size: Callable[[Any], int] | None = None, repeats: int = 1
) -> None:
    """Run the Trainer's own evaluation, on the longest samples where they are enough for so many batches of a rank.

    `size` is as in Samples, and `repeats` says how often each sample comes.

    With `compute_metrics` it runs whole: then what the model says of each sample stays in memory until the end.
    """
    datasets = trainer.eval_dataset
    count = max(1, batches * trainer.args.eval_batch_size * trainer.args.world_size // repeats)
    if trainer.compute_metrics is not None:
        trainer.evaluate()
    elif isinstance(datasets, Mapping):
        trainer.evaluate({name: longest_of(trainer, each, count, size) for name, each in datasets.items()})
    else:
        trainer.evaluate(longest_of(trainer, datasets, count, size))


def longest_of(trainer: Trainer, dataset: Any, count: int, size: Callable[[Any], int] | None) -> Any:
    """The `count` longest samples of `dataset`, longest first; all of it where it has no more."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):  # a stream
        return dataset
    if len(dataset) <= count:
        return dataset
    chosen = [Samples(trainer.get_eval_dataloader(dataset), size).longest_first[:count]]
    if torch.distributed.is_initialized():  # a rank may have looked at other samples of a slow data set
        torch.distributed.broadcast_object_list(chosen, src=0)
    getattr(trainer, "_eval_dataloaders", {}).clear()  # the Trainer would keep the whole one, with lasting workers
    (indices,) = chosen
    # A data set of `datasets` stays one, so that the Trainer leaves out its unused columns.
    return dataset.select(indices) if hasattr(dataset, "select") else torch.utils.data.Subset(dataset, indices)
