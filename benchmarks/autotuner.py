"""What DeepSpeed's Autotuner finds for a workload: started as its documentation has it, limited in time, and read.

    python benchmarks/autotuner.py FOLDER MODEL [--gpus 1] [--seq-len 2048] [--batch 64] [--cap 24] [--full]
        [--seconds 540] [--read]

It runs `deepspeed --autotuning run` over a working script (`autotuned.py`) in FOLDER, and prints as JSON what its
folders of experiments and results then hold; `--read` only reads them. Its best fair chance:

- `"stage": "all"`, as it tries no other stage than the given one otherwise, and the batch as `max_train_batch_size`;
- under `--cap` (GiB) it sees a GPU of that size, and each experiment is held to it;
- the script keeps warnings off stderr, where any line with the word "error" counts as a failure;
- mlflow, where installed, is hidden from it: it would stop at once with KeyError 'MLFLOW_RUN_ID';
- where its time is over before it answers, the fastest experiment so far counts as its answer;
- pdsh at hand: after each experiment it has pdsh kill, over ssh, whatever bears the experiment's name. Without pdsh
  that raises an error in a thread, which changes nothing; with it and an sshd nothing is found, since all processes of
  the experiment have ended and its configuration is passed in base64. So a `pdsh` that does nothing comes first on
  PATH, and neither pdsh nor ssh has to be installed, on one node.

It needs `tabulate`. On a CPU it sees as many GPUs as `--gpus` says (LOCAL_SIZE), and takes the growth of a process
during one forward pass for a sample's activations. Two things in DeepSpeed 0.19.8 cannot be helped from outside: each
experiment of the full search beyond the fast one ends before it is started, with KeyError 'hostfile' in a thread; and
the training that `run` starts with the answer is no training, but the same experiment again, as its configuration
still has the Autotuner's section.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from side_by_side import BY_HAND, HERE, OF_THE_BUS, Ended, Work, gpu_numbers, run

_LAUNCHER = """
import sys
sys.modules["mlflow"] = None
cap = int(sys.argv.pop(1))
from deepspeed.accelerator import get_accelerator
if cap:
    get_accelerator().total_memory = lambda *_: cap
from deepspeed.launcher.runner import main
main()
"""
"""`deepspeed`, on a GPU of the cap's size and without mlflow."""
_RESULTS, _EXPERIMENTS = "autotuning_results", "autotuning_exps"
_BEST = "ds_config_optimal.json"
_PROFILE = "profile_model_info"
"""Its first start of the script, which measures the model and is no experiment."""
_STEPS = 50
_NOISE = re.compile(r"it/s\]|s/it\]|^\s*$")
"""Lines of progress bars."""


def configuration(work: Work, fast: bool) -> dict[str, Any]:
    """The file that the Autotuner starts from."""
    return {
        "zero_optimization": {"stage": "all"},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "autotuning": {
            "enabled": True,
            "fast": fast,
            "metric": "throughput",
            "max_train_batch_size": work.batch,
            "results_dir": _RESULTS,
            "exps_dir": _EXPERIMENTS,
        },
    }


def autotune(work: Work, folder: Path, fast: bool, longest: float, *, checkpointing: bool = False) -> dict[str, Any]:
    """Run it in `folder` for at most `longest` seconds; what it found, and what that took."""
    tools = folder / "bin"
    tools.mkdir(parents=True, exist_ok=True)
    (tools / "pdsh").write_text("#!/bin/sh\nexit 0\n")
    (tools / "pdsh").chmod(0o755)
    (folder / "ds_config.json").write_text(json.dumps(configuration(work, fast)))
    gpus = gpu_numbers(work.gpus)
    spec = work.spec("deepspeed", folder, steps=_STEPS, gpus=gpus) | {"checkpointing": checkpointing}
    (folder / "spec.json").write_text(json.dumps(spec))
    cap = int(work.cap_gib * 2**30) if work.cap_gib else 0
    slots = ",".join(map(str, range(work.gpus)))
    words = [sys.executable, "-c", _LAUNCHER, str(cap), "--include", f"localhost:{slots}", "--autotuning", "run"]
    words += ["--master_port", str(30000 + os.getpid() % 10000)]
    words += [str(HERE / "autotuned.py"), "spec.json", "--deepspeed_config", "ds_config.json"]
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = BY_HAND | {"PATH": path}
    environment |= OF_THE_BUS if gpus else {"LOCAL_SIZE": str(work.gpus)}
    ended = run(words, longest=longest, environment=environment, folder=folder)
    (folder / "output.txt").write_text(ended.text)
    return taken(folder, ended) | read_results(folder)


def taken(folder: Path, ended: Ended) -> dict[str, Any]:
    """Seconds until it had its answer (the training that `run` then starts is not counted), and its last words."""
    best, began = folder / _RESULTS / _BEST, (folder / "spec.json").stat().st_mtime
    seconds = best.stat().st_mtime - began if best.exists() else ended.seconds
    lines = [line for line in ended.text.splitlines() if not _NOISE.search(line)]
    return {"exit_code": ended.code, "seconds": round(seconds, 1), "last_words": lines[-6:]}


def read_results(folder: Path) -> dict[str, Any]:
    """What its folders say: how many experiments there were, which failed and why, and the configuration chosen.

    `finished` is whether it chose itself; otherwise the fastest experiment so far is `chosen`, or None.
    """
    results = folder / _RESULTS
    is_over = (results / "summary.txt").exists()
    names = sorted(path.stem for path in (folder / _EXPERIMENTS).glob("*.json") if path.stem != _PROFILE)
    speeds: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name in names:
        metrics = results / name / "metrics.json"
        if metrics.exists():
            speeds[name] = float(json.loads(metrics.read_text().splitlines()[0])["throughput"])
        else:
            failed[name] = _why(results / name / "stderr.log", is_over)
    failed = {name: why for name, why in failed.items() if why}
    best = results / _BEST
    if not best.exists() and speeds:
        best = results / max(speeds, key=lambda name: speeds[name]) / "ds_config.json"
    chosen = json.loads(best.read_text()) if best.exists() else None
    if chosen is not None:
        chosen.pop("autotuning", None)
    return {
        "experiments": len(names),
        "failures": len(failed),
        "failed": failed,
        "samples_per_second": speeds,
        "finished": best.name == _BEST and chosen is not None,
        "chosen": chosen,
    }


def _why(errors: Path, is_over: bool) -> str:
    """The last line with an error in it, as the Autotuner itself looks for one.

    An experiment that says nothing has failed only if the search is over; otherwise it was cut off or is yet to come.
    """
    said = errors.read_text(errors="replace").splitlines() if errors.exists() else []
    lines = [line for line in said if "error" in line.lower()]
    if lines:
        return lines[-1][:300]
    silent = "it ended without a figure" if errors.exists() else "it was never started"
    return silent if is_over else ""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("model")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--cap", type=float)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--read", action="store_true")
    options = parser.parse_args(arguments)
    folder = options.folder.absolute()
    if options.read:
        print(json.dumps(read_results(folder), indent=1))
        return
    sizes = {"gpus": options.gpus, "seq_len": options.seq_len, "batch": options.batch}
    work = Work(model=options.model, cap_gib=options.cap, **sizes)
    print(json.dumps(autotune(work, folder, not options.full, options.seconds), indent=1))


if __name__ == "__main__":
    main()
