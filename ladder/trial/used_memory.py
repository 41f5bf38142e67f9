"""How much of a GPU's memory all processes use, from NVML's C library: a rank need not have its Python package."""

from __future__ import annotations

import ctypes
from typing import Any


class _Memory(ctypes.Structure):
    """nvmlMemory_t, as nvml.h defines it."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class UsedMemory:
    """Of the GPU with this UUID. RuntimeError if NVML does not answer, OSError if there is no NVML."""

    def __init__(self, uuid: str) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._handle = ctypes.c_void_p()
        self._ask("nvmlInitWithFlags", 0)
        self._ask("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._handle))

    def read(self) -> int:
        """Bytes."""
        memory = _Memory()
        self._ask("nvmlDeviceGetMemoryInfo", self._handle, ctypes.byref(memory))
        return int(memory.used)

    def _ask(self, function: str, *arguments: Any) -> None:
        status = getattr(self._nvml, function)(*arguments)
        if status != 0:
            raise RuntimeError(f"NVML's {function} ended with error {status}")
