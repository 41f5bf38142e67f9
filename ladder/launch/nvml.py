"""NVML: memory, utilisation and power of the GPUs, sampled while ranks run."""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pynvml

from ladder.errors import EnvironmentFaultError
from ladder.events.trial_run import DeviceUse
from ladder.machine.gpus import users_of

_PERIOD_SECONDS = 0.25
"""Between two samples. Every query takes locks of the driver that kernel launches need too. Chosen: at 0.05 s, with
another default changed as well, stage 3 was 15 to 36 % slower (benchmarks/results/4xh200-llama-2-7b-40gib)."""


# After these errors a GPU does not recover by itself. After any other error the query is repeated.
_LOST = frozenset(
    {pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_DRIVER_NOT_LOADED}
)
_ATTEMPTS = 3
"""Failed queries in a row before a GPU counts as lost. Chosen: a single failure may be chance."""
_RECENT_MICROSECONDS = 1_000_000
"""Chosen: NVML notes the use of a process a few times a second."""
_RETRY_SECONDS = 0.1
"""Between two attempts. Chosen: enough for a busy driver to answer, and no trial waits long."""


@dataclass(frozen=True)
class _Sample:
    t: float
    used: tuple[int, ...]
    utilisation: tuple[float | None, ...]
    joules: tuple[float | None, ...]
    others: tuple[float | None, ...]


class Gpus:
    """The GPUs of a trial, by UUID. Memory that was in use at the last `mark` is not counted."""

    def __init__(self, uuids: Sequence[str]) -> None:
        """Raises EnvironmentFaultError if a GPU is lost, as every method does: no configuration is to blame."""
        self._handles: list[tuple[str, Any]] = []
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise _lost(", ".join(uuids), error) from None
        for uuid in uuids:
            self._handles.append((uuid, _ask(uuid, pynvml.nvmlDeviceGetHandleByUUID, uuid)))
        self.mark()

    def _used(self) -> tuple[int, ...]:
        return tuple(int(_ask(uuid, pynvml.nvmlDeviceGetMemoryInfo, handle).used) for uuid, handle in self._handles)

    def mark(self) -> None:
        """From now on, do not count the memory that is in use at this moment; what runs there now is others'."""
        self._before = self._used()
        self._others = tuple(frozenset(users_of(handle)) for _, handle in self._handles)

    def wait_released(self, seconds: float, tolerance: int = 64 << 20) -> bool:
        """Wait until no GPU has more memory in use than at the last `mark`; False if that takes more than `seconds`."""
        deadline = time.monotonic() + seconds
        while any(used > before + tolerance for used, before in zip(self._used(), self._before, strict=True)):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def sample(self) -> _Sample:
        handles = [handle for _, handle in self._handles]
        return _Sample(
            t=time.clock_gettime(time.CLOCK_MONOTONIC),
            used=tuple(used - before for used, before in zip(self._used(), self._before, strict=True)),
            utilisation=tuple(_try(lambda h: pynvml.nvmlDeviceGetUtilizationRates(h).gpu / 100, h) for h in handles),
            joules=tuple(_try(lambda h: pynvml.nvmlDeviceGetTotalEnergyConsumption(h) / 1000, h) for h in handles),
            others=tuple(_taken(*pair) for pair in zip(handles, self._others, strict=True)),
        )


def _ask(uuid: str, query: Any, *arguments: Any) -> Any:
    """A query that every trial needs. Raises EnvironmentFaultError if the GPU does not answer."""
    for attempt in range(_ATTEMPTS):
        try:
            return query(*arguments)
        except pynvml.NVMLError as error:
            if error.value in _LOST or attempt == _ATTEMPTS - 1:
                raise _lost(uuid, error) from None
        time.sleep(_RETRY_SECONDS)
    raise AssertionError("unreachable")


def _lost(uuid: str, error: Any) -> EnvironmentFaultError:
    return EnvironmentFaultError(
        f"GPU {uuid} no longer answers ({error}); reset it or reboot, then start the same command again "
        "(measurements are kept)."
    )


def _try(query: Any, handle: Any) -> float | None:
    """Some GPUs and virtual machines do not support every query; the table then shows a dash."""
    try:
        return float(query(handle))
    except pynvml.NVMLError:
        return None


def _taken(handle: Any, others: frozenset[int]) -> float | None:
    """The share of the GPU's time that `others` took in the last second; None where NVML does not say it."""
    if not others:
        return 0.0
    try:
        samples = pynvml.nvmlDeviceGetProcessUtilization(handle, 0)
    except pynvml.NVMLError as error:
        return 0.0 if error.value == pynvml.NVML_ERROR_NOT_FOUND else None
    # By NVML's own clock: the ranks that are measured have fresh samples too.
    newest = max((each.timeStamp for each in samples), default=0)
    fresh = (each for each in samples if newest - each.timeStamp < _RECENT_MICROSECONDS)
    latest = {each.pid: each.smUtil / 100 for each in sorted(fresh, key=lambda each: each.timeStamp)}
    return float(min(1.0, sum(share for pid, share in latest.items() if pid in others)))


class Sampler:
    """Samples the GPUs in its own thread between `start` and `stop`."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._samples: list[_Sample] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.fault: str | None = None
        """Why a GPU can no longer be sampled; None while all answer."""

    def start(self) -> None:
        self._samples.clear()
        self.fault = None
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_SECONDS):
            try:
                self._samples.append(self._gpus.sample())
            except EnvironmentFaultError as error:
                self.fault = str(error)
                return

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def between(self, began: float, ended: float) -> DeviceUse:
        """What was sampled from `began` to `ended` (CLOCK_MONOTONIC); the means include the neighbouring samples."""
        times = [sample.t for sample in self._samples]
        first, last = bisect.bisect_left(times, began), bisect.bisect_right(times, ended)
        inside, window = self._samples[first:last], self._samples[max(0, first - 1) : last + 1]
        taken = [mean(of_a_gpu) for of_a_gpu in zip(*(sample.others for sample in window), strict=True)]
        return DeviceUse(
            utilisation=mean([value for sample in window for value in sample.utilisation]),
            watts=_watts(window),
            # Without the neighbouring samples: one may belong to the next candidate, which needs more memory.
            peak_bytes=max((max(sample.used) for sample in inside), default=None),
            others=max((each for each in taken if each is not None), default=None),
        )


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _watts(window: Sequence[_Sample]) -> float | None:
    """Mean power from the GPUs' own energy counters, which also count between samples."""
    if len(window) < 2 or window[-1].t <= window[0].t:
        return None
    pairs = list(zip(window[0].joules, window[-1].joules, strict=True))
    if any(start is None or end is None for start, end in pairs):
        return None
    return sum(end - start for start, end in pairs if start is not None and end is not None) / (
        window[-1].t - window[0].t
    )
