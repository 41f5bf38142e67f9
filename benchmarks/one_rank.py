"""What all programs of one rank share that train beside ladder: the model, a clock, memory's limit, what is measured.

`by_hand.py`, `finders.py` and `autotuned.py` are such programs. Each gets a SPEC.json from `side_by_side.py` and
appends a JSON line for each measurement to the file that it names. They train without ladder; on a CPU, ladder's gauge
limits and reads their memory, as it does in a tune: the data segment since the start.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import time
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import transformers
from agreed import MOST

CLIP = 1.0
"""The norm that gradients are clipped to."""
_FEWEST = 2
_WITHOUT_LIMIT = 1 << 50
"""Bytes: more than any host has."""
_NO_MEMORY = (
    "out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "std::bad_alloc",
    "could not create a prim",
)


def read_spec(path: str) -> dict[str, Any]:
    """What SPEC.json asks for."""
    spec: dict[str, Any] = json.loads(Path(path).read_text())
    return spec


def begin(spec: dict[str, Any]) -> torch.device:
    """The rank's device, and the limit of a CPU's memory."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    _gauge().start(int(spec["cap_gib"] * 2**30) if spec["cap_gib"] else _WITHOUT_LIMIT)
    return torch.device("cpu")


def join(device: torch.device) -> None:
    """The process group, of one rank if nothing started several."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(alone | {"MASTER_PORT": str(_free_port())} | os.environ)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def _free_port() -> int:
    """A port that nobody listens on now, as another benchmark may run on the host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@cache
def _gauge() -> Any:
    from ladder.trial.gauge import CpuGauge

    return CpuGauge()


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, of a GPU or under the limit of a CPU's data segment."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(each in str(error) for each in _NO_MEMORY)


def make_model(spec: dict[str, Any], device: torch.device) -> Any:
    """The model with random weights, with its adapters, checkpointing and Liger's kernels."""
    raw = {key: value for key, value in spec["config"].items() if key not in ("torch_dtype", "dtype")}
    config = transformers.AutoConfig.for_model(raw.pop("model_type"), **raw)
    torch.manual_seed(0)
    of_16_bits = spec["method"].startswith(("zero", "deepspeed")) or spec["lora"]
    is_masked = spec["task"] == "masked-lm"
    cls = transformers.AutoModelForMaskedLM if is_masked else transformers.AutoModelForCausalLM
    if spec["load_in"]:
        model = _in_4_bits(cls, config, device)
    else:
        with device:
            model = cls.from_config(config, dtype=torch.bfloat16 if of_16_bits else torch.float32)
    if spec["liger"]:
        from transformers.integrations.liger import apply_liger_kernel

        apply_liger_kernel(model, None)
    if spec["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if spec["lora"]:
        import peft

        if spec["load_in"]:
            model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=spec["checkpointing"])
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **spec["lora"]))
    model.train()
    return model


def _in_4_bits(cls: Any, config: Any, device: torch.device) -> Any:
    """From a folder of random weights: quantisation happens while they are loaded, as with a real checkpoint."""
    import tempfile

    quantisation = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    with tempfile.TemporaryDirectory() as folder:
        with device:
            cls.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        return cls.from_pretrained(
            folder, quantization_config=quantisation, dtype=torch.bfloat16, device_map={"": device}
        )


def deepspeed_for(device: torch.device) -> Any:
    """The package; on a CPU without the operator that it would compile for a faster reduction within a host."""
    package = import_module("deepspeed")
    if device.type == "cpu":
        import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    return package


def adam(model: Any) -> torch.optim.Optimizer:
    """AdamW over what is trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-5, fused=True)


class Clock:
    """Times optimizer steps, the first one apart, and ends when that is exact enough, or after `steps` of the spec."""

    def __init__(self, spec: dict[str, Any], device: torch.device) -> None:
        self._spec, self._device, self._most = spec, device, spec.get("steps", MOST)
        self._began: float | None = None
        self._joules: float | None = None
        self.seconds: list[float] = []

    def done(self) -> bool:
        """To be called after each step: whether it was the last one needed."""
        ended = now(self._device)
        if self._began is None:
            limit_memory(self._spec["cap_gib"], self._device)
            self._joules = _joules(self._device)
        else:
            self.seconds.append(_slowest(ended - self._began, self._device))
        self._began = now(self._device)
        is_timed = sum(self.seconds) >= self._spec["seconds"] or len(self.seconds) >= self._most
        return is_timed and len(self.seconds) >= _FEWEST

    def row(self, micro_batch: int, accumulation: int) -> dict[str, Any]:
        """Speed over all ranks by the median of the last steps, energy, and the peak of this rank's memory."""
        tokens, last = micro_batch * accumulation * world_size() * self._spec["seq_len"], self.seconds[-MOST:]
        row: dict[str, Any] = {"micro_batch": micro_batch, "accumulation": accumulation}
        row |= {"tokens_per_second": round(tokens / statistics.median(last), 1), "steps": len(self.seconds)}
        joules = _joules(self._device)
        if joules is not None and self._joules is not None:
            used = _together(joules - self._joules, self._device, dist.ReduceOp.SUM)
            row["joules_per_token"] = round(used / (tokens * len(self.seconds)), 5)
        return row | peaks(self._device)


def append(spec: dict[str, Any], row: dict[str, Any]) -> None:
    """A line of rank 0."""
    if os.environ.get("RANK", "0") == "0":
        with Path(spec["rows"]).open("a") as file:
            file.write(json.dumps(row) + "\n")


def forget_peaks(device: torch.device) -> None:
    """Give back the allocator's cache, and measure peaks from now on."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        _gauge().reset()


def peaks(device: torch.device) -> dict[str, float]:
    """GiB of this rank since `forget_peaks`."""
    if device.type == "cuda":
        allocated, whole = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved() + _outside_torch()
    else:
        allocated = whole = _gauge().read().device
    return {"peak_allocated_gib": round(allocated / 2**30, 3), "peak_device_gib": round(whole / 2**30, 3)}


def limit_memory(cap_gib: float | None, device: torch.device) -> None:
    """Leave torch's allocator what the rest of the process leaves of the cap; a CPU has its limit from `begin`.

    The rest grows in the first step. What torch had taken of it before may be its cache, so it is given back, and the
    steps to come show whether they need it: the allocator refuses them if so.
    """
    if cap_gib is None or device.type == "cpu":
        return
    room = cap_gib * 2**30 - _outside_torch()
    torch.cuda.set_per_process_memory_fraction(min(1.0, room / torch.cuda.mem_get_info()[1]))
    if torch.cuda.max_memory_reserved() > room:
        forget_peaks(device)


def _outside_torch() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def age() -> float:
    """Seconds since this process was started."""
    return time.time() - psutil.Process().create_time()


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def now(device: torch.device) -> float:
    """Seconds on a clock, once the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic()


def _slowest(seconds: float, device: torch.device) -> float:
    """The slowest rank's, so that all ranks decide alike."""
    return _together(seconds, device, dist.ReduceOp.MAX)


def _together(value: float, device: torch.device, how: Any) -> float:
    if world_size() == 1:
        return value
    of_all = torch.tensor(value, device=device, dtype=torch.float64)
    dist.all_reduce(of_all, how)
    return float(of_all)


def _joules(device: torch.device) -> float | None:
    """What the rank's GPU has used so far, by its own counter; None on a CPU and where it does not count."""
    if device.type == "cpu":
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000
    except pynvml.NVMLError:
        return None
