# mypy: disable-error-code="import-untyped, import-not-found, attr-defined"
"""Trains a LoRA adapter on texts with TRL's SFTTrainer."""

from __future__ import annotations

import argparse

from datasets import load_dataset
from peft import LoraConfig, TaskType
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="model")
    parser.add_argument("--data", default="text/train.jsonl")
    parser.add_argument("--output_dir", default="adapter")
    parser.add_argument("--max_steps", type=int, default=-1)
    parser.add_argument("--max_length", type=int, default=128)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--use_cpu", action="store_true")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    texts = load_dataset("json", data_files=args.data, split="train").train_test_split(test_size=0.1, seed=0)

    adapter = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=args.rank,
        lora_alpha=2 * args.rank,
        lora_dropout=0.05,
        bias="none",
        target_modules="all-linear",
    )
    settings = SFTConfig(
        output_dir=args.output_dir,
        max_steps=args.max_steps,
        num_train_epochs=1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        learning_rate=2e-4,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        max_length=args.max_length,
        packing=args.packing,
        dataset_text_field="text",
        bf16=not args.use_cpu,
        use_cpu=args.use_cpu,
        logging_steps=1,
        eval_strategy="no",
        save_strategy="epoch",
        report_to="none",
    )
    trainer = SFTTrainer(
        model=model,
        args=settings,
        train_dataset=texts["train"],
        eval_dataset=texts["test"],
        processing_class=tokenizer,
        peft_config=adapter,
    )
    trainer.model.print_trainable_parameters()
    trainer.train()
    trainer.save_model(args.output_dir)
    print(trainer.evaluate())


if __name__ == "__main__":
    main()
