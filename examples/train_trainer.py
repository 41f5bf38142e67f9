"""Train a tiny model with the Hugging Face Trainer.

    bash best_config.launch.sh train_trainer.py best_config.trainer.json

The arguments come from the JSON file, or from the command line as `ladder export --for trainer` prints them.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import deepspeed
import torch
from tiny import build_model, leave, report, sequences, weight_sums
from transformers import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer


class FirstWeights(TrainerCallback):
    """Remembers the weights before the first step. At ZeRO stage 3 only the prepared model has them."""

    sums: list[float]

    def on_train_begin(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        self.sums = weight_sums(model)


parser = HfArgumentParser(TrainingArguments)
if len(sys.argv) == 2:
    (arguments,) = parser.parse_json_file(sys.argv[1])
    arguments.max_steps, arguments.learning_rate, arguments.lr_scheduler_type = 2, 2e-3, "constant"
else:
    (arguments,) = parser.parse_args_into_dataclasses()
train, evaluation = sequences(16), sequences(4)
if "PARALLELISM_CONFIG_SP_SIZE" in os.environ:  # set by the launch script if ranks share sequences
    deepspeed.init_distributed()
    for row in (*train, *evaluation):
        row["position_ids"] = torch.arange(len(row["input_ids"]))
arguments.output_dir = os.environ.get("REPORT_DIR", "output")
arguments.logging_steps, arguments.report_to, arguments.save_strategy = 1, [], "no"
arguments.disable_tqdm = True

first = FirstWeights()
trainer = Trainer(build_model(), arguments, train_dataset=train, eval_dataset=evaluation, callbacks=[first])
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
report(
    "trainer",
    trainer.model_wrapped,
    first.sums,
    [*losses, trainer.evaluate()["eval_loss"]],
    epoch=trainer.state.epoch,
    checkpointed_layers=[
        module.gradient_checkpointing
        for module in trainer.model.modules()
        if isinstance(module, GradientCheckpointingLayer)
    ],
)
trainer.accelerator.end_training()
leave()
