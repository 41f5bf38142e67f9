"""What page-locked memory costs an offloading trial: to have it, to use it, to give it back. Needs a CUDA GPU.

    python benchmarks/pinning.py [--parameters 1.69e9] [--settings torch registered huge torch]

Each setting is a process of its own that takes what a rank with the optimizer on the host does: fp32 parameters,
gradients and the 16-bit parameters pinned, both moments pageable; and, as data loaders do, many small buffers of which
several lie in one page. `torch` pins as torch does by itself, `registered` has memory touched by eight threads and then
registered, `huge` that in huge pages. The first process of all also pays for what the host has never handed out before,
so it is run once unrecorded. The last line is `huge` over `torch`:
`pin_ratio=… exit_ratio=… copy_ratio=… step_ratio=…`, the medians where a setting ran more than once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

_GROWING = "expandable_segments:True"
_REGISTERED = {
    "PYTORCH_CUDA_ALLOC_CONF": f"{_GROWING},pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
}
_SETTINGS = {
    "torch": {"PYTORCH_CUDA_ALLOC_CONF": _GROWING},
    "registered": _REGISTERED,
    "huge": _REGISTERED | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1.69e9)
    parser.add_argument("--settings", nargs="+", choices=list(_SETTINGS), default=["torch", "registered", "huge"] * 2)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        as_a_rank(int(options.parameters))
    measure("torch", options.parameters)
    rows: dict[str, list[dict[str, float]]] = {}
    for setting in options.settings:
        row = measure(setting, options.parameters)
        rows.setdefault(setting, []).append(row)
        print(f"{setting:10s}", " ".join(f"{name} {value:6.2f}" for name, value in row.items()), flush=True)
    if {"torch", "huge"} <= rows.keys():
        print(last_line(rows))


def measure(setting: str, parameters: float) -> dict[str, float]:
    """Seconds, and GB/s of copies, in a process with this setting of the allocators."""
    command = [sys.executable, __file__, "--rank", "--parameters", str(parameters)]
    ran = subprocess.run(command, env=os.environ | _SETTINGS[setting], capture_output=True, text=True, check=True)
    ended = time.monotonic()
    row = json.loads(ran.stdout.splitlines()[-1])
    return {**row, "exit": ended - row.pop("done")}


def as_a_rank(parameters: int) -> None:
    """Prints the figures of this process, and ends it as a rank ends: without destructors."""
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    torch.zeros(1, device="cuda")
    began = time.perf_counter()
    master = torch.zeros(parameters, dtype=torch.float32, pin_memory=True)
    gradients = torch.zeros(parameters, dtype=torch.float32, pin_memory=True)
    half = torch.zeros(parameters, dtype=torch.bfloat16, pin_memory=True)
    figures = {"pin": time.perf_counter() - began}
    began = time.perf_counter()
    small = [torch.ones(64 + index % 64, pin_memory=True) for index in range(2000)]
    for buffer in small:
        buffer.cuda(non_blocking=True)
    del small
    figures["small"] = time.perf_counter() - began
    on_gpu = torch.zeros(parameters, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    half.copy_(on_gpu, non_blocking=True)
    torch.cuda.synchronize()
    figures["copy"] = 2e-9 * parameters / (time.perf_counter() - began)
    parameter = torch.nn.Parameter(master)
    parameter.grad = gradients
    optimizer = DeepSpeedCPUAdam([parameter], lr=1e-5)
    seconds = []
    for _ in range(4):  # the first one makes the moments
        began = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    figures |= {"first_step": seconds[0], "step": statistics.median(seconds[1:]), "done": time.monotonic()}
    print(json.dumps(figures), flush=True)
    os._exit(0)


def last_line(rows: dict[str, list[dict[str, float]]]) -> str:
    def median(setting: str, name: str) -> float:
        return statistics.median(row[name] for row in rows[setting])

    names = ("pin", "exit", "copy", "step")
    return " ".join(f"{name}_ratio={median('huge', name) / median('torch', name):.3f}" for name in names)


if __name__ == "__main__":
    main()
