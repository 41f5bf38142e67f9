"""The proof of a script with the Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from ladder.trial.script.hold import Grip
from ladder.trial.script.real_steps import RealSteps
from ladder.trial.script.samples import Samples

_BATCHES = 32
"""Of a rank, in the evaluation of a proof. Chosen: the longest ones come first, and hold the most; more of them only
settle what is allocated."""


class RealStepsOfTrainer(TrainerCallback):  # type: ignore[misc]
    """The proof: the Trainer's own loop on the script's own data; then its evaluation, a save, and a resume."""

    def __init__(self, trainer: Trainer, grip: Grip) -> None:
        self._trainer, self._grip = trainer, grip
        self._steps = self._make_steps()
        self._get_batches = trainer.get_batch_samples
        trainer.get_batch_samples = self._timed
        step = trainer.training_step

        def noted(*arguments: Any, **options: Any) -> Any:
            try:
                loss = step(*arguments, **options)
            except BaseException as error:
                grip.leave(error)
            self._steps.note_loss(loss)
            return loss

        trainer.training_step = noted

    def _make_steps(self) -> RealSteps:
        loader = self._trainer.callback_handler.train_dataloader
        return RealSteps(self._grip, Samples(loader, known=self._grip.known_sizes))

    def _timed(self, *arguments: Any, **options: Any) -> Any:
        with self._steps.loading():
            batches, items = self._get_batches(*arguments, **options)
        for batch in batches:
            self._note(batch)
        return batches, items

    def _note(self, batch: Any) -> None:
        self._steps.note_batch(batch)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self._steps.end_step():
            self._grip.held("trainer", self._finish)

    def _finish(self) -> None:
        trainer, grip = self._trainer, self._grip
        facts = grip.script.facts
        if facts is not None and facts.evaluates:
            grip.reporter.phase("evaluation")
            with grip.reporter.during("evaluation"):
                self._evaluate()
        grip.reporter.phase("gather")
        with grip.reporter.during("save"):
            if facts is not None and facts.checkpoints:
                trainer._save_checkpoint(trainer.model_wrapped, trial=None)
            else:
                trainer.save_model(str(Path(grip.script.scratch) / "saved"))
        if facts is not None and facts.checkpoints:
            with grip.reporter.during("resume"):
                self._resume()
        self._steps.report(trainer.model)

    def _evaluate(self) -> None:
        evaluate(self._trainer)

    def _resume(self) -> None:
        from transformers.integrations.deepspeed import deepspeed_load_checkpoint

        trainer = self._trainer
        torch.distributed.barrier()
        folder = get_last_checkpoint(trainer.args.output_dir)
        if folder is None:
            return
        if not self._grip.spec.uses_deepspeed:
            trainer._load_from_checkpoint(folder)
            trainer._load_optimizer_and_scheduler(folder)
        elif not trainer.args.save_only_model:
            strict = not hasattr(trainer.model, "peft_config")  # an adapter's checkpoint has the adapter alone
            deepspeed_load_checkpoint(trainer.model_wrapped, folder, load_module_strict=strict)


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
