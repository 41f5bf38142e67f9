"""A raw DeepSpeed loop: a language model learns reviews under a DeepSpeed file of the script's own. Batches of 16."""

# mypy: disable-error-code="import-untyped, import-not-found"
import argparse
from typing import Any

import deepspeed
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "gradient_clipping": 1.0,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--max_steps", type=int, default=1000)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model)
    reviews = load_dataset("json", data_files=options.data, split="train")

    def tokenize(rows: dict[str, list[str]]) -> Any:
        return tokenizer(rows["text"], max_length=512, truncation=True, padding="max_length")

    reviews = reviews.map(tokenize, batched=True, remove_columns=["text"])
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        config=CONFIG,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-6),
        training_data=reviews,
        collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    while True:
        for batch in loader:
            loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss
            engine.backward(loss)
            last_of_a_step = engine.is_gradient_accumulation_boundary()
            engine.step()
            if last_of_a_step and engine.global_steps % 20 == 0 and engine.global_rank == 0:
                print({"loss": loss.item(), "step": engine.global_steps}, flush=True)
            if engine.global_steps >= options.max_steps:
                return


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
