# mypy: disable-error-code="import-untyped, misc, type-arg, no-untyped-def"
"""Trains on texts that grow longer, within HEADROOM_MIB on top of the memory that it has at its start."""

from __future__ import annotations

import argparse
import os
import resource

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

SAMPLES, VOCABULARY = 256, 512


class Texts(torch.utils.data.Dataset):
    """Of 16 tokens at first, of 256 in the last quarter."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = 256 if index >= 3 * SAMPLES // 4 else 16
        ids = torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class InOrder(Trainer):
    def _get_train_sampler(self, *_: object) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Narrow(TrainerCallback):
    """Another program takes the rest of the memory."""

    def on_train_begin(self, *_: object, **__: object) -> None:
        with open("/proc/self/status") as status:
            (used,) = [int(line.split()[1]) << 10 for line in status if line.startswith("VmData:")]
        limit = used + (int(os.environ["HEADROOM_MIB"]) << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))


def padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([each["input_ids"] for each in samples], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.clone()}


parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", default="out")
parser.add_argument("--save_steps", type=int, default=2)
given = parser.parse_args()

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
    )
)
arguments = TrainingArguments(
    output_dir=given.output_dir,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=1,
    num_train_epochs=1,
    weight_decay=0.1,
    logging_steps=1,
    save_steps=given.save_steps,
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
)
trainer = InOrder(model=model, args=arguments, train_dataset=Texts(), data_collator=padded)
if "HEADROOM_MIB" in os.environ:
    trainer.add_callback(Narrow())
trainer.train()
