"""What a proof evaluates of a Trainer's evaluation data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers import TINY_CONFIG
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ladder.trial.script.trainer_proof import evaluate

LENGTHS = [4 + number % 50 for number in range(200)]


class Noted(Trainer):  # type: ignore[misc]
    """Notes the shapes of the batches that it evaluates."""

    def prediction_step(self, model: Any, inputs: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        self.seen = [*getattr(self, "seen", []), tuple(inputs["input_ids"].shape)]
        return super().prediction_step(model, inputs, *arguments, **options)


def padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([each["input_ids"] for each in samples], batch_first=True)
    return {"input_ids": ids, "labels": ids.clone()}


def trainer_of(folder: Path, lengths: list[int], **options: Any) -> Any:
    config = LlamaConfig(**TINY_CONFIG)
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_eval_batch_size=2, report_to="none", use_cpu=True, disable_tqdm=True
    )
    samples = [{"input_ids": torch.ones(length, dtype=torch.long)} for length in lengths]
    return Noted(model=LlamaForCausalLM(config), args=arguments, eval_dataset=samples, data_collator=padded, **options)


def test_of_many_samples_a_proof_evaluates_the_longest(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, LENGTHS)
    evaluate(trainer)
    assert len(trainer.seen) == 32
    longest = sorted(LENGTHS, reverse=True)[:64:2]
    assert trainer.seen == [(2, length) for length in longest]


def test_where_the_evaluation_keeps_what_the_model_says_it_runs_whole(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, LENGTHS, compute_metrics=lambda given: {"kept": 1.0})
    evaluate(trainer)
    assert len(trainer.seen) == len(LENGTHS) // 2


def test_a_short_evaluation_runs_whole(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, LENGTHS[:10])
    evaluate(trainer)
    assert len(trainer.seen) == 5
