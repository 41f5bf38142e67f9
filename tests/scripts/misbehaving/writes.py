# mypy: disable-error-code="import-untyped, import-not-found, misc"
"""Writes into its folder while it trains, tells a tracker, and pushes the model to the hub."""

import argparse
import json
from pathlib import Path
from typing import Any

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--offline", action="store_true", help="neither tracker nor hub")
options = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained("model")
model = AutoModelForCausalLM.from_pretrained("model")
texts = load_dataset("json", data_files="text/train.jsonl", split="train")
texts = texts.map(lambda row: tokenizer(row["text"], truncation=True, max_length=64), remove_columns=["text"])
collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)


class Notes(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"step-{state.global_step}.json").write_text(json.dumps({"epoch": state.epoch}))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        with open(Path(args.output_dir) / "log.jsonl", "a") as file:
            file.write(json.dumps(logs) + "\n")


arguments = TrainingArguments(
    output_dir="written",
    max_steps=4,
    logging_steps=1,
    save_steps=2,
    report_to="none" if options.offline else "wandb",
    push_to_hub=not options.offline,
    hub_model_id="somebody/written",
)
trainer = Trainer(model=model, args=arguments, train_dataset=texts, data_collator=collate, callbacks=[Notes()])
trainer.train()
trainer.save_model("written/final")
Path("written/done").touch()
if not options.offline:
    trainer.push_to_hub()
