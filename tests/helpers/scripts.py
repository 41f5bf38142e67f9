"""The training scripts of tests/scripts: what a look finds in one, their commands, and a folder to start them in."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from helpers.values import TINY_CONFIG, bundled_workload
from ladder.workload.script import Script, ScriptFacts
from ladder.workload.workload import Workload

SCRIPTS = Path(__file__).parents[1] / "scripts"
MISBEHAVING = SCRIPTS / "misbehaving"


def make_script(*command: str, **facts: Any) -> Script:
    """A Trainer's script with 1,000 samples of up to 512 tokens; `facts` are changes to what a look found."""
    found: dict[str, Any] = {
        "kind": "trainer",
        "path": "/home/me/train.py",
        "digest": "5f" * 32,
        "model_config_json": TINY_CONFIG,
        "model_class": "LlamaForCausalLM",
        "num_parameters": 1_000_000,
        "num_trainable": 1_000_000,
        "micro_batch": 4,
        "accumulation": 2,
        "dtype": "bf16",
        "optimizer": "adamw_torch_fused",
        "gradient_clipping": 1.0,
        "longest": 512,
        "rows": 1,
        "mean_tokens": 128.0,
        "num_samples": 1_000,
        "num_looked_at": 1_000,
    }
    return Script(command=command or ("train.py",), facts=ScriptFacts(**found | facts))


def script_workload(script: Script, **changes: Any) -> Workload:
    """The workload of `script`, with 32 samples in an optimizer step."""
    settings: dict[str, Any] = {"seq_len": script.facts.longest, "global_batch_size": 32, "script": script}
    return bundled_workload(**settings | changes)


def folder_with_inputs(folder: Path, source: Path) -> Path:
    """`folder` with a copy of the models and data in `source`, which `make_inputs` made."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    return folder


def make_inputs(folder: Path) -> Path:
    """Fill `folder` with the tiny models and data that the scripts read."""
    command = [sys.executable, str(SCRIPTS / "make_inputs.py"), str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=250)
    return folder


def files_in(folder: Path) -> dict[str, str]:
    """The digest of every file under `folder` by its path there, without what ladder itself writes."""
    own = ("best_config.", "ladder-runs/", "stdout.txt", "stderr.txt")
    found = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
    return {name: digest_of(file) for name, file in found.items() if not name.startswith(own)}


def digest_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
