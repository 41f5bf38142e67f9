"""Measures and limits a rank's memory: by torch's allocator and NVML on a GPU, by the data segment on a CPU."""

from __future__ import annotations

import ctypes
import resource
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from ladder.events.memory_limit import slack
from ladder.trial.failure import OverLimitError
from ladder.trial.host_memory import HostMemory
from ladder.trial.of_deepspeed import is_installed
from ladder.trial.other_programs import OtherPrograms
from ladder.trial.used_memory import UsedMemory
from ladder.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Bytes: peaks since the last `reset`, of the host since the start; and the number of allocation retries."""

    allocated: int
    reserved: int
    device: int
    outside_torch: int
    peak_host: int
    held_host: int
    """At the moment."""
    alloc_retries: int
    others: float | None
    """Of the cores' time since the last `reset`, what other programs took; None where it is not known."""


_LEFT = 0.5
"""On a CPU: the share of an engine's memory that may be left in the process, free but not given back. Chosen: the next
engine uses it first, so that its own peak is above."""


class Gauge(ABC):
    def __init__(self) -> None:
        self._limit = 0
        self._host, self._others = HostMemory(), OtherPrograms()

    @abstractmethod
    def start(self, limit: int) -> None:
        """Limit this process to `limit` bytes from now on; called before each trial, with a process group."""

    @abstractmethod
    def is_clear(self) -> bool:
        """Whether the trial before left so little memory that another one is measured as in a new process."""

    @abstractmethod
    def reset(self) -> None:
        """Forget the peaks."""

    def settle(self) -> bool:
        """Lower torch's limit by what libraries have allocated outside torch since the start, if it alone has one.

        True if torch has reserved more than the new limit since the last `reset`: then steps within it are still to
        come. Raises OverLimitError if the memory outside torch alone is too much.
        """
        return False

    def lift(self) -> None:  # noqa: B027 - only torch's allocator may be limited, and reporting does not use it
        """Remove the limit, so that a rank that exceeded it can still report."""

    @abstractmethod
    def read(self) -> Reading: ...

    @abstractmethod
    def free(self) -> int:
        """Bytes left under the limit now."""

    def _reading(self, **device: int) -> Reading:
        """With what is held on the host."""
        held, others = self._host.held(), self._others.share()
        return Reading(**device, peak_host=self._host.peak(), held_host=held, others=others)


def make_gauge(device: str, gpu_uuid: str | None) -> Gauge:
    return CudaGauge(gpu_uuid or "") if device == "cuda" else CpuGauge()


class CudaGauge(Gauge):
    """Limits torch's allocator to the limit minus the memory that the process uses outside torch, according to NVML.

    That is the use of the whole GPU minus what was in use before: containers hide figures by process.
    """

    def __init__(self, gpu_uuid: str) -> None:
        super().__init__()
        self._used = UsedMemory(gpu_uuid)
        self._before = self._used.read()
        self._outside_after_first: int | None = None
        self._retries = 0

    def _outside(self) -> int:
        return max(0, self._used.read() - self._before - torch.cuda.memory_reserved())

    def start(self, limit: int) -> None:
        self._limit = limit
        self._host.start()
        tell_deepspeed(self.free)
        self.settle()

    def is_clear(self) -> bool:
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # there is no public way; a new process has none
        torch.cuda.empty_cache()
        outside = self._outside()
        if self._outside_after_first is None:  # with the handles and kernels that every engine needs
            self._outside_after_first = outside
        return max(torch.cuda.memory_reserved(), abs(outside - self._outside_after_first)) <= slack(self._limit)

    def settle(self) -> bool:
        torch.cuda.synchronize()
        outside = self._outside()
        room = self._limit - outside - slack(self._limit)
        if room <= 0:
            raise OverLimitError(
                f"the CUDA context and libraries alone use {format_bytes(outside)} of {format_bytes(self._limit)}"
            )
        limit_torch(room)
        return torch.cuda.max_memory_reserved() > room

    def reset(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._retries = self._alloc_retries()
        self._others.reset()

    def _alloc_retries(self) -> int:
        return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))

    def read(self) -> Reading:
        outside, reserved = self._outside(), torch.cuda.max_memory_reserved()
        if reserved + outside > self._limit:
            raise OverLimitError(
                f"torch reserved {format_bytes(reserved)} and {format_bytes(outside)} are in use outside torch, "
                f"more than the limit of {format_bytes(self._limit)}"
            )
        return self._reading(
            allocated=torch.cuda.max_memory_allocated(),
            reserved=reserved,
            device=reserved + outside,
            outside_torch=outside,
            alloc_retries=self._alloc_retries() - self._retries,
        )

    def free(self) -> int:
        return max(0, self._limit - slack(self._limit) - self._outside() - torch.cuda.memory_allocated())


class CpuGauge(Gauge):
    """Limits the process's data segment (RLIMIT_DATA) to its size at the start plus the limit.

    The kernel does not record the peak of the data segment, so a thread samples it every few milliseconds.
    """

    _PERIOD_SECONDS = 0.005

    def __init__(self) -> None:
        super().__init__()
        self._before = 0
        self._peak = 0
        self._sampler = threading.Thread(target=self._sample, name="gauge", daemon=True)

    def start(self, limit: int) -> None:
        self._host.start()
        self._limit = limit
        if not self._sampler.is_alive():  # otherwise what an earlier trial left counts against this one
            self._sampler.start()
            self._before = data_bytes()
        limit_data(self._before + limit)

    def _sample(self) -> None:
        tick = threading.Event()
        while not tick.wait(self._PERIOD_SECONDS):
            self._peak = max(self._peak, data_bytes())

    def is_clear(self) -> bool:
        with suppress(AttributeError):  # only glibc can return free memory to the kernel
            ctypes.CDLL(None).malloc_trim(0)
        return data_bytes() - self._before <= _LEFT * (self._peak - self._before)

    def lift(self) -> None:
        limit_data(resource.RLIM_INFINITY)

    def reset(self) -> None:
        self._peak = 0
        self._others.reset()

    def read(self) -> Reading:
        peak = max(0, max(self._peak, data_bytes()) - self._before)
        return self._reading(allocated=peak, reserved=peak, device=peak, outside_torch=0, alloc_retries=0)

    def free(self) -> int:
        return max(0, self._before + self._limit - data_bytes())


def limit_torch(room: int) -> None:
    """Let torch's allocator take `room` bytes of the current GPU."""
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, room / total))


def tell_deepspeed(free: Callable[[], int]) -> None:
    """Let DeepSpeed see the limit: it asks how much is free before it flattens parameters on the GPU."""
    if not is_installed():
        return
    from deepspeed.accelerator import get_accelerator

    get_accelerator().available_memory = lambda device_index=None: free()


def limit_data(most: int) -> None:
    """Let this process's data segment have `most` bytes."""
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))


def data_bytes() -> int:
    """Of this process's data segment."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmData")
