"""Starts the training in a process of its own, as a sweep does."""

import subprocess
import sys
from pathlib import Path

script = Path(__file__).resolve().parent.parent / "causal_trainer.py"
for rate in ("1e-4", "1e-5"):
    options = ["--model_name_or_path", "model", "--train_file", "text/train.jsonl", "--max_steps", "2"]
    options += ["--learning_rate", rate, "--output_dir", f"rate-{rate}", *sys.argv[1:]]
    subprocess.run([sys.executable, str(script), *options], check=True)
