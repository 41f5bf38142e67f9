# mypy: disable-error-code="import-untyped, import-not-found, misc, no-untyped-def, no-untyped-call"
"""QLoRA with the Trainer: a model in 4 bits, prepared as peft says, with adapters on its attention."""

import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--train-file", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--max-steps", type=int, default=8)
    parser.add_argument("--use-cpu", action="store_true")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model_path)
    quantised = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(args.model_path, quantization_config=quantised, dtype=torch.bfloat16)
    model = prepare_model_for_kbit_training(model)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))

    texts = load_dataset("json", data_files=args.train_file, split="train")
    texts = texts.map(
        lambda rows: tokenizer(rows["text"], truncation=True, max_length=64),
        batched=True,
        remove_columns=texts.column_names,
    )
    settings = TrainingArguments(
        output_dir=args.output_dir,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=args.max_steps,
        learning_rate=2e-4,
        bf16=True,
        use_cpu=args.use_cpu,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = Trainer(
        model=model,
        args=settings,
        train_dataset=texts,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    trainer.save_model(args.output_dir)


if __name__ == "__main__":
    main()
