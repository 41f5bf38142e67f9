"""A tune, and trainings without ladder, of the same work: started, limited in time and read.

`against_plain.py`, `autotuner.py` and `compare.py` share this. Every process gets a marker into its environment, which
all that it starts inherit; at the end whatever still bears it is ended, and nothing else.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pynvml
from agreed import CANNOT, CANNOT_RUN, OUT_OF_MEMORY

from ladder.launch.counting import counting
from ladder.launch.trial_server import kill_marked, marked, wait_gone
from ladder.machine.gpus import visible_gpus
from ladder.report.first_fit import first_fit
from ladder.runs.stored_run import StoredRun, read_run
from ladder.workload.lora import lora_from_text
from ladder.workload.source import resolve_model
from ladder.workload.workload import Task

HERE = Path(__file__).parent
BY_HAND = {
    name: os.environ.get(name, "expandable_segments:True") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
}
"""The growing allocator, as whoever trains by hand sets it. A tune makes settings of its own, where it finds none."""
OF_THE_BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""CUDA then numbers GPUs as NVML does."""
MARKER = "LADDER_BENCHMARK"
TIME_OVER = "time was over"
_PATIENCE = 20.0
"""Seconds between asking a process to end and killing it. Chosen: torchrun and ladder end their ranks in a few."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is trained, and where. `gpus` are ranks where there is no GPU."""

    model: str
    gpus: int = 1
    seq_len: int = 2048
    batch: int = 64
    cap_gib: float | None = None
    lora: str | None = None
    load_in: str | None = None
    task: Task = "causal-lm"
    is_script: bool = False
    """TRL's own SFT program trains; `unmodified.py` has its ways."""

    def spec(self, method: str, folder: Path, **more: Any) -> dict[str, Any]:
        """What a program of one rank reads; `folder` is for what it writes."""
        shape = resolve_model(self.model, count=counting())
        return {
            "method": method,
            "checkpointing": False,
            "config": dict(shape.config),
            "task": self.task,
            "seq_len": self.seq_len,
            "batch": self.batch,
            "cap_gib": self.cap_gib,
            "liger": bool(visible_gpus()) and "liger" in shape.blocks_with and _installed("liger_kernel"),
            "lora": lora_from_text(self.lora).for_peft() if self.lora else None,
            "load_in": self.load_in,
            "folder": str(folder),
            "rows": str(folder / "rows.jsonl"),
            **more,
        }


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int | None
    """None if its time was over."""
    seconds: float
    text: str
    """All that it said."""

    @property
    def why(self) -> str:
        """In words."""
        if self.code is None:
            return f"{TIME_OVER} after {self.seconds:.0f} s"
        if self._is(OUT_OF_MEMORY):
            return "out of memory"
        said = [line for line in self.text.splitlines() if line.startswith(CANNOT)]
        return said[0] if self._is(CANNOT_RUN) and said else self.text[-600:]

    def _is(self, code: int) -> bool:
        """Torchrun ends with 1, and names the code of the rank that failed."""
        return self.code == code or f"exitcode  : {code} " in self.text


def run(
    words: Sequence[str], *, longest: float, environment: Mapping[str, str] = {}, folder: Path | None = None
) -> Ended:
    """Run a command in `folder` for at most `longest` seconds, and end all that it started."""
    marker = uuid.uuid4().hex
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        code: int | None = None
        try:
            process = subprocess.Popen(
                list(words),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **environment, MARKER: marker},
                cwd=folder,
                start_new_session=True,
            )
            code = process.wait(longest)
        except subprocess.TimeoutExpired:
            process.terminate()
        finally:  # also if this benchmark itself is told to end
            seconds = time.monotonic() - began
            _end(marker)
        process.wait()
        output.seek(0)
        return Ended(code, round(seconds, 1), output.read())


def _end(marker: str) -> None:
    """End what bears the marker; whoever was told to end has a while for it."""
    told = marked(marker, MARKER)
    for process in told:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    wait_gone(told, _PATIENCE)
    while kill_marked(marker, MARKER):
        pass  # what one of them started meanwhile


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def run_ranks(program: str, spec: Mapping[str, Any], ranks: int, longest: float) -> tuple[list[dict[str, Any]], Ended]:
    """The lines that a program of one rank wrote, and how it ended: alone, or as several ranks by torchrun."""
    folder, rows = Path(spec["folder"]), Path(spec["rows"])
    (folder / "spec.json").write_text(json.dumps(spec))
    rows.unlink(missing_ok=True)
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    words = [*launch, str(HERE / program), str(folder / "spec.json")]
    ended = run(words, longest=longest, environment=BY_HAND | first_gpus(ranks), folder=folder)
    return [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else [], ended


def gpu_numbers(count: int) -> list[str]:
    """Of the first GPUs to be used, in the order of the bus: DeepSpeed reads numbers only. None without a GPU."""
    handles = [pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid) for gpu in visible_gpus()[:count]]
    return [str(pynvml.nvmlDeviceGetIndex(handle)) for handle in handles]


def first_gpus(count: int) -> dict[str, str]:
    """Variables that leave a program these GPUs: on a host with more, the Trainer would take them all."""
    numbers = gpu_numbers(count)
    return {"CUDA_VISIBLE_DEVICES": ",".join(numbers)} | OF_THE_BUS if numbers else {}


def by_hand(work: Work, method: str, checkpointing: bool, longest: float, **more: Any) -> list[dict[str, Any]]:
    """The rows of one method; the last one says how it ended, if that was not by itself."""
    known = {"method": method, "checkpointing": checkpointing}
    with tempfile.TemporaryDirectory() as folder:
        spec = work.spec(method, Path(folder), **more) | {"checkpointing": checkpointing}
        rows, ended = run_ranks("by_hand.py", spec, work.gpus, longest)
    found = [known | row for row in rows]
    return found if ended.code == 0 else [*found, known | {"ended": ended.why}]


def tune(work: Work, folder: Path, longest: float | None, *options: str, program: Sequence[str] = ()) -> dict[str, Any]:
    """What a tune found, with and without DeepSpeed, the documented recipe's first fit, and what failed on the way.

    Of `program`, if there is one: it says the model, the lengths and the adapters itself.
    """
    run_folder, output = folder / "run", folder / "best_config.json"
    run_folder.mkdir(parents=True, exist_ok=True)
    words = ["tune", *([] if program else [work.model, "--seq-len", work.seq_len]), "--global-batch-size", work.batch]
    words += ["--run-dir", run_folder, "--output", output, "--gpus", work.gpus if visible_gpus() else 0]
    words += ["--knobs", int(work.gpus > 1)]  # on several GPUs a tune may try one by itself; with a time budget, twelve
    cap = f"{round(work.cap_gib * 1024)}MiB" if work.cap_gib else None
    lora = None if program else work.lora
    for name, value in (("--gpu-memory", cap), ("--lora", lora), ("--load-in", work.load_in)):
        words += [name, value] if value else []
    whole = [*map(str, words), *options, *(["--", *program] if program else [])]
    ended = run([sys.executable, "-m", "ladder", *whole], longest=longest or sys.maxsize)
    told: dict[str, Any] = {"seconds": ended.seconds, "last_lines": ended.text.splitlines()[-14:]}
    if ended.code != 0:
        return told | {"exit_code": ended.code, "error": ended.why}
    section = json.loads(output.read_text())["ladder"]
    stored = read_run(run_folder)
    fit, plain = first_fit(stored.space, stored.records), section.get("plain") or {}
    return told | {
        "deepspeed": {key: section[key] for key in ("engine", "checkpoint_every", "micro_batch", "tokens_per_second")},
        "peak_device_gib": section["memory_per_gpu"]["peak_device_gib"],
        "limit_gib": section["memory_per_gpu"]["limit_gib"],
        "joules_per_token": section["joules_per_token"],
        "plain": plain or None,
        "first_fit": fit.plain() if fit else None,
        "trials": len(stored.trial_seconds),
        "tried": [_tried(stored, trial) for trial in stored.trial_seconds],
        "failed": {each.candidate_key: each.outcome.sentence for each in stored.records if each.outcome.kind != "fits"},
        "failures": sum(record.outcome.kind != "fits" for record in stored.records),
        "tokens_per_second": max(section["tokens_per_second"], plain.get("tokens_per_second", 0.0)),
    }


def _tried(stored: StoredRun, trial: str) -> dict[str, Any]:
    """A trial: its seconds, and the tokens/s of its candidates, None of those that do not fit."""
    own = [record for record in stored.records if record.trial == trial]
    return {
        "trial": trial,
        "purpose": own[0].purpose if own else None,
        "seconds": round(sum(stored.trial_seconds[trial].values()), 1),
        "tokens_per_second": {
            record.candidate_key: record.tokens_per_second and round(record.tokens_per_second, 1) for record in own
        },
    }


def faster(found: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The faster of a tune's two answers, and its file."""
    plain, own = found["plain"] or {"tokens_per_second": 0.0}, found["deepspeed"]
    is_plain = plain["tokens_per_second"] > own["tokens_per_second"]
    return (plain, "best_plain.json") if is_plain else (own, "best_config.json")


def told_of(found: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """What a record of the comparison takes from a tune and the answer that was trained with."""
    keys = ("engine", "checkpoint_every", "micro_batch", "tokens_per_second")
    chosen = {key: answer[key] for key in keys} | {"trials": found["trials"]}
    told = {key: found[key] for key in ("seconds", "tried", "failures", "failed")}
    return told | {"answer": chosen}


def sizes(work: Work) -> list[int]:
    """Powers of two that divide a GPU's whole batch."""
    most = work.batch // work.gpus
    return [2**n for n in range(most.bit_length()) if most % 2**n == 0]
