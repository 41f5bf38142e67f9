# mypy: disable-error-code="import-untyped, import-not-found, misc"
"""Saves in all ways while it trains, reads what it saved, writes beside it, and keeps its last checkpoint."""

import json
import os
import shutil
from pathlib import Path

import torch
from few import Training
from transformers import LlamaForCausalLM

training, made, kept = Training(), 0, list[str]()
accelerator = training.accelerator
for _epoch in range(4000):
    for batch in training.loader:
        training.step(batch)
        made += 1
        folder = f"checkpoints/step-{made}"
        os.makedirs(folder, exist_ok=True)
        accelerator.save_state(folder)
        if accelerator.is_main_process:
            torch.save({"made": made}, "best.tmp")
            os.replace("best.tmp", "best.pt")
            assert torch.load("best.pt") == {"made": made}
            accelerator.unwrap_model(training.model).save_pretrained("hub")
            assert LlamaForCausalLM.from_pretrained("hub").num_parameters()
            with open(f"{folder}/progress.json", "w") as file:
                json.dump({"made": made}, file)
            assert "progress.json" in os.listdir(folder)
            above = os.getcwd()
            os.chdir(folder)
            shutil.copy("progress.json", "copy.json")
            os.chdir(above)
            assert "copy.json" in os.listdir(folder)
            if os.path.lexists("checkpoints/latest"):
                os.unlink("checkpoints/latest")
            os.symlink(f"step-{made}", "checkpoints/latest")
            assert Path("checkpoints/latest/copy.json").resolve().is_file()
            kept.append(folder)
            while len(kept) > 1:
                shutil.rmtree(kept.pop(0))
        accelerator.wait_for_everyone()
        accelerator.load_state(folder)
        print("read again after", made, flush=True)
