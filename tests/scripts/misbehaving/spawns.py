"""Starts the training in a process of its own, as a sweep does: by one of several ways."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "causal_trainer.py"
OPTIONS = ["--model_name_or_path", "model", "--train_file", "text/train.jsonl", "--max_steps", "2"]


if __name__ == "__main__":
    way, *more = sys.argv[1:]
    command = [sys.executable, str(SCRIPT), *OPTIONS, "--output_dir", "out", *more]
    if way == "run":
        subprocess.run(command, check=True)
    elif way == "exec":
        os.execv(command[0], command)
    else:
        subprocess.run(["bash", "tune.sh"], check=True)
