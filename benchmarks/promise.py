"""Does a training keep what its tune promised? The same unmodified scripts, tuned and then trained, in one run.

    python benchmarks/promise.py FILE.json [--scripts sft dpo grpo reviews raw first-fit course price-sft price-reviews]
        [--model NAME] [--layers N] [--gpus 1] [--gpu-memory 24GiB] [--rung zero2 …] [--micro-batch 8]
        [--steps 20 120] [--time-budget 60s]

Each script is tuned (`ladder tune … -- script`) and trained with the answer (`ladder run`). Its own logging says when
it had made so many optimizer steps; reached speed is that of the steps between those of `--steps`. Beside it stand the
peak that NVML sees during the training, that of the proof, and the most that the answer promises; `reached_seconds` are
those of every 20 steps.
`first-fit` is the reviews script where the documented ladder first fits, and `course` the same script under the file
that courses hand out: stage 3 with both offloads.
`price-sft` compares the seconds of one trial of that script with those of a synthetic workload of the same model,
length and engine: `--rung` and `--micro-batch` say which.

Model folders with random weights and data of uneven lengths are made beside FILE.json. FILE.json gets a row for each
script; a row that it already holds is not run again. The last line is
`scripts=3 worst_pct=1.9 ranges=1 widest_pct=12.0`.
`worst_pct` is the largest distance of a reached speed from its promise: from the one figure, or from the nearer end of
a promised range, and 0 within the range. `ranges` counts the promises that were ranges, and `widest_pct` is the largest
of these, from end to end, over the proof's own speed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from script_inputs import Peak, made_model, make_data

from ladder.runs.stored_run import read_run

_TRL = {"sft": ("text", "--max_length"), "dpo": ("pairs", "--max_length"), "grpo": ("prompts", "")}
"""TRL's scripts: the data set of each, and the argument for the longest sample."""
_OF_TRL, _OF_THE_COURSE = "llama-3.2-1b", "opt-125m"
"""The models of the scripts. Chosen: a small one of today, and the one that the course trains."""
_COMPLETION = 64
"""Tokens that GRPO generates for a prompt at most. Chosen: a step of transformers' generation takes seconds."""
_EVERY = 20
"""Steps between two lines of the scripts' logging."""
_LOSS = re.compile(r"'loss': ")
_SCRIPTS = Path(__file__).parent / "scripts"
_OF_OURS = {"reviews": _SCRIPTS / "reviews.py", "raw": _SCRIPTS / "raw_deepspeed.py"}
"""A course's script with the Trainer, and a loop over DeepSpeed's engine."""


def _command(name: str, model: Path, data: Path, length: int) -> list[str]:
    if name in _OF_OURS:
        return [str(_OF_OURS[name]), "--model", str(model), "--data", str(data / "text" / "train.jsonl")]
    if name not in _TRL:
        raise SystemExit(f"there is no script {name}")
    rows, longest = _TRL[name]
    command = ["-m", f"trl.scripts.{name}", "--model_name_or_path", str(model), "--dataset_name", str(data / rows)]
    command += ["--output_dir", "never-written", "--logging_steps", str(_EVERY), "--save_strategy", "no"]
    command += ["--learning_rate", "1e-6", "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "8"]
    if name == "grpo":
        reward = ["--reward_funcs", "get_soft_overlong_punishment", "--num_generations", "4"]
        return [*command, *reward, "--max_completion_length", str(_COMPLETION)]
    return [*command, longest, str(length)]


def main() -> None:
    arguments = _arguments()
    rows: list[dict[str, Any]] = json.loads(arguments.file.read_text()) if arguments.file.exists() else []
    folder = arguments.file.absolute().parent / "promise-inputs"
    make_data(folder)
    for name in arguments.scripts:
        model_name = arguments.model or (_OF_TRL if name.removeprefix("price-") in _TRL else _OF_THE_COURSE)
        if any(row["script"] == name and row["model"] == model_name for row in rows):
            continue
        model = made_model(folder, model_name, arguments.layers)
        known = {"script": name, "model": model_name, "layers": arguments.layers}
        row = known | _row(name, model, folder, arguments)
        rows.append(row)
        arguments.file.write_text(json.dumps(rows, indent=1) + "\n")
        print(json.dumps(row), flush=True)
    print(last_line([row for row in rows if row.get("reached_over_promised")]))


def last_line(rows: list[dict[str, Any]]) -> str:
    """Of rows with a promised and a reached speed."""
    missed, widths = [], []
    for row in rows:
        reached, promised = row["reached_samples_per_second"], row["promised_samples_per_second"]
        speeds = row.get("promised_samples_per_second_range")
        low, high = speeds or (promised, promised)
        missed.append(max(0.0, 1 - reached / low, reached / high - 1))
        widths += [(high - low) / promised] if speeds else []
    return (
        f"scripts={len(missed)} worst_pct={100 * max(missed, default=0.0):.1f} "
        f"ranges={len(widths)} widest_pct={100 * max(widths, default=0.0):.1f}"
    )


def _row(name: str, model: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    if name == "course":
        return _under_a_course_s_file(model, folder, arguments)
    if name.startswith("price-"):
        command = _command(name.removeprefix("price-"), model, folder, arguments.length)
        return _price(name, command, model, arguments)
    if name == "first-fit":
        command = _command("reviews", model, folder, arguments.length)
        run = str(arguments.file.absolute().parent / "first-fit-run")
        return _kept(name, command, ["--strategy", "walk", "--backend", "deepspeed", "--run-dir", run], arguments)
    command = _command(name, model, folder, arguments.length)
    return _kept(name, command, ["--time-budget", arguments.time_budget, "--knobs", "0"], arguments)


def _under_a_course_s_file(model: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The reviews script under the DeepSpeed file that courses hand out: stage 3, both offloads."""
    offload = {"device": "cpu", "pin_memory": True}
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": offload, "offload_param": offload},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    file = folder / "course.json"
    file.write_text(json.dumps(config))
    command = _command("reviews", model, folder, arguments.length)
    ranks = max(1, int(arguments.gpus))
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    few, more = arguments.steps
    logged, peak = _trained([*start, *command, "--deepspeed", str(file), "--max_steps", str(more)], more)
    reached = 16 * ranks * (more - few) / _between(logged, few, more)
    return {"command": command, "reached_samples_per_second": round(reached, 3), "reached_peak_gib": peak}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--scripts", nargs="+", default=["sft", "dpo", "reviews"])
    parser.add_argument("--model", help="of all scripts (default: llama-3.2-1b for TRL's, opt-125m for the others)")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--gpus", default="1")
    parser.add_argument("--gpu-memory")
    parser.add_argument("--rung", nargs="*", default=[])
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--steps", nargs=2, type=int, default=[20, 120])
    parser.add_argument("--time-budget", default="60s")
    return parser.parse_args()


def _kept(name: str, command: list[str], search: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    answer = arguments.file.absolute().parent / f"{name}.json"
    rungs = [word for rung in arguments.rung for word in ("--rung", rung)]
    began = time.monotonic()
    tuned = _ladder(["tune", *_limits(arguments), *rungs, *search, "--output", str(answer), "--", *command])
    seconds = time.monotonic() - began
    if tuned.returncode:
        return {"failed": tuned.stderr[-800:] + tuned.stdout[-800:]}
    section = json.loads(answer.read_text())["ladder"]
    told = {"script": name, "tune_seconds": round(seconds, 1), "last_lines": tuned.stdout.splitlines()[-12:]}
    print(json.dumps(told), flush=True)  # what a run that is cut off still says
    promised = section["script"]["samples_per_second"]
    few, more = arguments.steps
    logged, peak = _trained(["run", str(answer), "--", *command, "--max_steps", str(more)], more)
    reached = (more - few) * section["workload"]["global_batch_size"] / _between(logged, few, more)
    return {
        "command": command,
        "gpu_memory": arguments.gpu_memory,
        "world_size": section["world_size"],
        "candidate": f"{section['engine']} ckpt={section['checkpoint_every']} mb={section['micro_batch']}",
        "global_batch_size": section["workload"]["global_batch_size"],
        "mean_tokens": section["script"]["mean_tokens"],
        "promised_samples_per_second": promised,
        "promised_samples_per_second_range": section["script"]["samples_per_second_range"],
        "trial_tokens_per_second": section["proof"].get("trial_tokens_per_second"),
        "promised_tokens_per_second": section["tokens_per_second"],
        "promised_tokens_per_second_range": section["tokens_per_second_range"],
        "reached_samples_per_second": round(reached, 3),
        "reached_over_promised": round(reached / promised, 4),
        "reached_seconds": [round(later - earlier, 3) for earlier, later in pairwise(logged)],
        "proof_peak_gib": section["memory_per_gpu"]["peak_device_gib"],
        "promised_peak_gib": section["script"]["promised_device_gib"],
        "reached_peak_gib": round(peak, 3),
        "padding": section["script"]["padding"],
        "loader_share": section["script"]["loader_share"],
        "plain": section.get("plain"),
        **told,
    }


def _limits(arguments: argparse.Namespace) -> list[str]:
    return ["--gpus", arguments.gpus, *(["--gpu-memory", arguments.gpu_memory] if arguments.gpu_memory else [])]


def _price(name: str, command: list[str], model: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of one trial by phase: of the script, and of a synthetic workload of its length and global batch."""
    folder, (rung,) = arguments.file.absolute().parent, arguments.rung or ["zero2"]
    walk = ["tune", *_limits(arguments), "--rung", rung, "--micro-batch", str(arguments.micro_batch)]
    walk += ["--strategy", "walk", "--backend", "deepspeed"]
    phases: dict[str, dict[str, float]] = {}
    words = ["--", *command]
    for kind in ("script", "synthetic"):
        run = folder / f"{name}-{kind}"
        run.mkdir(exist_ok=True)
        answer = run / "answer.json"
        done = _ladder([*walk, "--run-dir", str(run), "--output", str(answer), *words])
        if done.returncode:
            return {"price": None, "price_failed": done.stderr[-500:]}
        phases[kind] = dict(next(iter(read_run(run).trial_seconds.values())))
        workload = json.loads(answer.read_text())["ladder"]["workload"]
        words = ["--seq-len", str(workload["seq_len"]), "--global-batch-size", str(workload["global_batch_size"])]
        words += [str(model)]
    whole = {kind: sum(seconds for phase, seconds in of.items() if phase != "start") for kind, of in phases.items()}
    return {"rung": rung, "price": round(whole["script"] / whole["synthetic"], 3), "price_phases": phases}


def _trained(words: list[str], more: int) -> tuple[list[float], float]:
    """When every 20th of `more` optimizer steps of `ladder words` was made, and the GiB in use beyond those before."""
    watch, logged, said = Peak(), [], ""
    process = subprocess.Popen(
        _command_line(words), env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        said = (said + line)[-3000:]
        logged += [time.monotonic()] * len(_LOSS.findall(line))
    peak = watch.stop()
    if process.wait() or len(logged) < more // _EVERY:
        raise SystemExit(f"the training failed: {said}")
    return logged, peak


def _between(logged: list[float], few: int, more: int) -> float:
    """Seconds from one optimizer step to another."""
    return logged[more // _EVERY - 1] - logged[few // _EVERY - 1]


def _ladder(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_command_line(words), capture_output=True, text=True, env=_environment(), check=False)


def _command_line(words: list[str]) -> list[str]:
    return [sys.executable, *(["-m", "ladder"] if words[0] in ("tune", "run") else []), *words]


def _environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


if __name__ == "__main__":
    main()
