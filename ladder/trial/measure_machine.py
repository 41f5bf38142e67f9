"""Measures the speeds of this machine in ranks of its own: `python -m ladder.trial.measure_machine`.

The job is one line of JSON on stdin: {"device": "cuda", "ranks": 2, "gpu_uuids": […], "parent": 1234}. The last line on
stdout has the points of each rate. Of each point it is the slowest rank's: ranks wait for each other as they train.
What cannot be measured is named under "failed" with the reason. When the parent ends, so do the ranks.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ladder.trial.machine_rates import Point, device_rates, link_rates, optimizer_rate
from ladder.trial.preload import HIDDEN

_PR_SET_PDEATHSIG = 1
"""Defined in Linux's prctl.h."""
_JOIN_SECONDS = 60.0
"""Chosen: a rank joins the others at once, or one of them has died."""

Found = dict[str, Any]


def main() -> int:
    """Fork the ranks before CUDA is used, and print what they found."""
    job = json.loads(sys.stdin.readline())
    _end_with(job["parent"])
    has_adam = _adam_is_built() and _load_adam()
    with tempfile.TemporaryDirectory() as folder:
        pids = [_forked(job, rank, Path(folder), has_adam) for rank in range(job["ranks"])]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        files = [Path(folder) / f"rank{rank}.json" for rank in range(job["ranks"])]
        found = [_found_by(rank, file, statuses[rank]) for rank, file in enumerate(files)]
    print(json.dumps(_slowest(found)), flush=True)
    return 0


def _slowest(found: list[Found]) -> Found:
    """Of each point the longest time of all ranks; a rate that one rank lacks is left out."""
    failed = {name: reason for one in found for name, reason in one.pop("failed", {}).items()}
    rates: dict[str, list[Point]] = {}
    for name in found[0]:
        ranks = [one[name] for one in found if name in one]
        if len(ranks) == len(found):
            rates[name] = [max(points, key=lambda point: point["seconds"]) for points in zip(*ranks, strict=False)]
    return {"rates": rates, "failed": failed}


def _forked(job: Mapping[str, Any], rank: int, folder: Path, has_adam: bool) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _end_with(os.getppid())
        found = _measured(job, rank, folder, has_adam)
        (folder / f"rank{rank}.json").write_text(json.dumps(found))
        status = 0
    finally:
        _leave(status)


def _leave(status: int) -> NoReturn:
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(status)  # no destructors: they take seconds


def _measured(job: Mapping[str, Any], rank: int, folder: Path, has_adam: bool) -> Found:
    device, found = job["device"], Found(failed={})
    if device == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = job["gpu_uuids"][rank]
        torch.cuda.set_device(0)
    if job["ranks"] > 1:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=dist.FileStore(str(folder / "store"), job["ranks"]),  # type: ignore[attr-defined]
            rank=rank,
            world_size=job["ranks"],
            timeout=timedelta(seconds=_JOIN_SECONDS),
        )
        _gather(found, "links", lambda: found.update(link_rates(device)))
    _gather(found, "device", lambda: found.update(device_rates(device)))
    if has_adam:
        _gather(found, "adam", lambda: found.update(adam=[optimizer_rate()]))
    return found


def _gather(found: Found, name: str, measure: Callable[[], None]) -> None:
    """What one kind of rate fails with does not cost the others."""
    try:
        measure()
    except Exception as error:
        found["failed"][name] = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _adam_is_built() -> bool:
    """Whether DeepSpeed's CPU Adam is compiled already; measuring takes seconds and compiles nothing."""
    from torch.utils.cpp_extension import get_default_build_root

    root = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    return any(Path(root).glob("**/cpu_adam/cpu_adam.so"))


def _load_adam() -> bool:
    from ladder.trial.operators import load

    for module in HIDDEN:  # they initialise CUDA, which forked ranks could then not use
        sys.modules[module] = None  # type: ignore[assignment]
    try:
        load("cpu_adam")
    except Exception:
        return False
    return not torch.cuda.is_initialized()


def _found_by(rank: int, file: Path, status: int) -> Found:
    try:
        found: Found = json.loads(file.read_text())
        return found
    except (OSError, ValueError):
        return {"failed": {"ranks": f"rank {rank} ended with status {status}"}}


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
