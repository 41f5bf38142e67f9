"""Turns an exception inside a rank into a typed outcome."""

from __future__ import annotations

import errno
import re
import traceback

from ladder.events.outcome import OutcomeKind
from ladder.units import GIB, KIB, MIB

_UNITS = {"bytes": 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|B|KiB|MiB|GiB)")

_GPU_OOM = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # no memory for the handle's workspace
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
    "Cuda failure 'out of memory'",
    "Failed to CUDA calloc",
    "Failed to CUDA malloc",
    "NVML_SUCCESS == r INTERNAL ASSERT",  # the allocator's own report of an OOM on partitioned GPUs
)
# Some versions of NCCL print the number only; 209 is another failure.
_NCCL_GPU_OOM = re.compile(r"Cuda failure 2\b")
_NCCL_PINNED_OOM = "Failed to CUDA host alloc"
# NCCL's shared memory: /dev/shm is host memory, but when it is full the error is that of a full disk.
_NCCL_SHARED = "/dev/shm/nccl-"
_HOST_OOM = (
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "std::bad_alloc",
    "Cannot allocate memory",
    "can't start new thread",
)
# oneDNN gives no reason. With "descriptor" in the message the operation is unsupported, without it memory ran out.
_ONEDNN_OOM = re.compile(r"could not create a (primitive|memory object)(?! desc)")
_DISK = ("No space left on device", "buffer nbytes != file bytes", "nbytes != file bytes")
_UNSUPPORTED = (
    "extra_forbidden",
    "Error building extension",
    "Unable to JIT load",
    "than buffer size",
    "does not support gradient checkpointing",
    "has no `tp_plan`",
)
_UNSUPPORTED_TYPES = {
    "ZeRORuntimeException",
    "CUDAMismatchException",
    "MissingCUDAException",
    "DeepSpeedConfigError",
    "ReplacedOptimizerError",
}
_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "remote worker crashing",
    "Broken pipe",
    "NCCL communicator was aborted",
    "remote process exited or there was a network error",
    "ncclRemoteError",
    "Socket Timeout",
    "Application timeout caused pair closure",
)


class OverLimitError(RuntimeError):
    """The memory that torch reserved and the memory outside torch together exceed the limit."""


def classify(error: BaseException, device: str) -> tuple[OutcomeKind, bool]:
    """The outcome of an exception, and whether it only follows from the failure of another rank.

    On the CPU device a limit on the rank's data segment stands in for GPU memory, so a failed host allocation is
    `gpu_oom` there.
    """
    text = f"{type(error).__name__}: {error}"

    def says(patterns: tuple[str, ...]) -> bool:
        return any(pattern in text for pattern in patterns)

    frames = traceback.extract_tb(error.__traceback__)[-3:]
    is_pinning = any("pin_memory" in frame.name or "pin_memory" in (frame.line or "") for frame in frames)
    if _NCCL_PINNED_OOM in text or (is_pinning and ("out of memory" in text or "invalid argument" in text)):
        return "pinned_oom", False
    if isinstance(error, OverLimitError) or type(error).__name__ == "OutOfMemoryError":
        return "gpu_oom", False
    if says(_GPU_OOM) or _NCCL_GPU_OOM.search(text):
        return "gpu_oom", False
    if (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)) or says(_DISK):
        return ("host_oom" if _NCCL_SHARED in text else "disk_full"), False
    if isinstance(error, MemoryError) or says(_HOST_OOM) or _ONEDNN_OOM.search(text):
        return ("gpu_oom" if device == "cpu" else "host_oom"), False
    if type(error).__name__ in _UNSUPPORTED_TYPES or says(_UNSUPPORTED):
        return "unsupported", False
    return "crash", says(_PEER)


def bytes_asked(error: BaseException) -> int | None:
    """The size of the failed allocation if the message names it."""
    match = _ASKED.search(str(error))
    return int(float(match.group(1)) * _UNITS[match.group(2)]) if match else None
