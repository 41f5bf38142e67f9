# mypy: disable-error-code="import-not-found, misc"
"""Writes into its folder while it trains, tells a tracker, and pushes the model to the hub."""

import json
from pathlib import Path
from typing import Any

from few import trainer
from transformers import TrainerCallback, TrainingArguments


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
    report_to="wandb",
    push_to_hub=True,
    hub_model_id="somebody/written",
)
writing = trainer(arguments, callbacks=[Notes()])
writing.train()
writing.save_model("written/final")
Path("written/done").touch()
writing.push_to_hub()
