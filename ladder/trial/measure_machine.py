"""Measures the speeds of this machine in ranks of its own: `python -m ladder.trial.measure_machine`.

The job is one line of JSON on stdin:

    {"device": "cuda", "gpu_uuids": […], "parent": 1234, "world": 4,
     "share": {"first": 0, "count": 2, "address": "10.0.0.1", "port": 0}}

Its `share` of the ranks runs here, and the others, on other nodes, meet them at address and port. With port 0, which is
for rank 0's node, a free one is chosen. The first line on stdout is {"port": …}, and the last line has the points of
each rate. Of each point it is the slowest rank's: ranks wait for each other as they train. What cannot be measured is
named under "failed" with the reason. When the parent ends, so do the ranks.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ladder.machine.rates import BETWEEN_NODES, Found, slowest
from ladder.trial.machine_rates import Point, device_rates, link_rates, optimizer_rate
from ladder.trial.preload import HIDDEN
from ladder.trial.protection import kernel
from ladder.trial.store import meeting_point, store_at

_JOIN_SECONDS = 120.0
"""Chosen: other nodes import torch only then, which may take a minute from a slow shared file system."""


def main() -> int:
    """Fork the ranks before CUDA is used, and print what they found."""
    job = json.loads(sys.stdin.readline())
    _end_with(job["parent"])
    has_adam = _adam_is_built() and _load_adam()
    ranks = range(job["share"]["count"])
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"rank{rank}.json" for rank in ranks]
        share = job["share"]
        listener, share["port"] = meeting_point(share["address"], share["port"], job["world"])
        print(json.dumps({"port": share["port"]}), flush=True)
        with listener:
            pids = [_forked(job, rank, files[rank], listener, has_adam) for rank in ranks]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        found = [_found_by(rank, files[rank], statuses[rank]) for rank in ranks]
    print(json.dumps(slowest(found)), flush=True)
    return 0


def _forked(job: Mapping[str, Any], rank: int, file: Path, listener: socket.socket, has_adam: bool) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _end_with(os.getppid())
        found = _measured(job, rank, listener, has_adam)
        file.write_text(json.dumps(found))
        status = 0
    finally:
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(status)  # no destructors: they take seconds


def _measured(job: Mapping[str, Any], rank: int, listener: socket.socket, has_adam: bool) -> Found:
    device, found = job["device"], Found(rates={}, failed={})
    rates = found["rates"]
    if device == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = job["gpu_uuids"][rank]
        torch.cuda.set_device(0)
    if job["world"] > 1:
        _gather(found, "links", lambda: rates.update(_links(job, rank, listener)))
    _gather(found, "device", lambda: rates.update(device_rates(device)))
    if has_adam:
        _gather(found, "adam", lambda: rates.update(adam=[optimizer_rate()]))
    return found


def _links(job: Mapping[str, Any], rank: int, listener: socket.socket) -> Iterator[tuple[str, list[Point]]]:
    """Collectives in this node, if it has several ranks, and between all nodes, if there are several."""
    device, count = job["device"], job["share"]["count"]
    node = _joined(job, rank, listener)
    if count > 1:
        yield from link_rates(device, node)
    if job["world"] > count:
        yield from ((BETWEEN_NODES + name, points) for name, points in link_rates(device))


def _joined(job: Mapping[str, Any], rank: int, listener: socket.socket) -> dist.ProcessGroup | None:
    """Meet all other ranks; returns the group of this node's, and None for all if there is one node."""
    share, world = job["share"], job["world"]
    number = share["first"] + rank
    listening = listener.detach() if number == 0 else None
    store = store_at(share["address"], share["port"], world, listening, seconds=_JOIN_SECONDS)
    listener.close()
    backend = "nccl" if job["device"] == "cuda" else "gloo"
    limit = timedelta(seconds=_JOIN_SECONDS)
    dist.init_process_group(backend, store=store, rank=number, world_size=world, timeout=limit)
    if share["count"] in (1, world):
        return None
    # Every rank has to make the groups of all nodes, in the same order.
    nodes = [range(first, first + share["count"]) for first in range(0, world, share["count"])]
    groups: list[dist.ProcessGroup] = [dist.new_group(ranks) for ranks in nodes]
    return groups[int(share["first"] // share["count"])]


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
        return Found(rates={}, failed={"ranks": f"rank {rank} ended with status {status}"})


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends."""
    kernel.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
