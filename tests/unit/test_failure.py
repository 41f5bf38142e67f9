"""Every message of reference/failures.md stands for the outcome that it has there."""

from __future__ import annotations

import errno

import pytest

from ladder.events.outcome import OutcomeKind
from ladder.trial.failure import OverLimitError, bytes_asked, classify
from ladder.units import GIB, MIB


class OutOfMemoryError(RuntimeError):
    """Like torch's own, which this test does without."""


class AcceleratorError(RuntimeError):
    """Like torch's."""


class ZeRORuntimeException(Exception):  # noqa: N818 - DeepSpeed's name
    """Like DeepSpeed's."""


HOST_ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "134217728 bytes. Error code 12 (Cannot allocate memory)"
)
NCCL_SHARED = "Error: failed to extend /dev/shm/nccl-Tsv9BP to 33030532 bytes, error: No space left on device (28)"
CAUSES: list[tuple[BaseException, OutcomeKind]] = [
    (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of …"), "gpu_oom"),
    (OutOfMemoryError("worded in another way"), "gpu_oom"),
    (AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported asynchronously"), "gpu_oom"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasGemmEx(…)`"), "gpu_oom"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), "gpu_oom"),
    (RuntimeError("NCCL error …\nLast error:\nCuda failure 2 'out of memory'"), "gpu_oom"),
    (RuntimeError("ncclUnhandledCudaError …\nLast error:\nCuda failure 'out of memory'"), "gpu_oom"),
    (RuntimeError("ncclUnhandledCudaError …\nLast error:\nFailed to CUDA malloc 6291456 bytes"), "gpu_oom"),
    (RuntimeError("Cuda failure 'out of memory'\nFailed to CUDA host alloc 4194304 bytes"), "pinned_oom"),
    (RuntimeError("ncclUnhandledCudaError …\nCuda failure 209 'no kernel image is available'"), "crash"),
    (RuntimeError("remote process exited or there was a network error. Failed to CUDA calloc async 4"), "gpu_oom"),
    (RuntimeError("Triton Error [CUDA]: out of memory"), "gpu_oom"),
    (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), "gpu_oom"),
    (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"), "host_oom"),
    (RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate`"), "gpu_oom"),
    (RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp":838'), "gpu_oom"),
    (OverLimitError("the CUDA context and libraries alone use 1.00 GiB of 0.50 GiB"), "gpu_oom"),
    (RuntimeError(HOST_ALLOCATOR), "host_oom"),
    (MemoryError(), "host_oom"),
    (RuntimeError("could not create a primitive"), "host_oom"),
    (RuntimeError("could not create a primitive descriptor for a matmul primitive"), "crash"),
    (RuntimeError("std::bad_alloc"), "host_oom"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "host_oom"),
    (OSError(errno.ENOSPC, "No space left on device"), "disk_full"),
    (RuntimeError(f"ncclSystemError …\nLast error:\n{NCCL_SHARED}"), "host_oom"),
    (OSError(errno.EDQUOT, "Disk quota exceeded"), "disk_full"),
    (RuntimeError("/nvme/swap/1.swp: buffer nbytes != file bytes 4096 != 0"), "disk_full"),
    (ValueError("1 validation error for DeepSpeedZeroConfig\nstage4\n  [type=extra_forbidden]"), "unsupported"),
    (ZeRORuntimeException("You are using ZeRO-Offload with a client provided optimizer"), "unsupported"),
    (RuntimeError("Error building extension 'cpu_adam'"), "unsupported"),
    (RuntimeError("Unable to JIT load the async_io op due to it not being compatible"), "unsupported"),
    (AssertionError("More elements 131072000 than buffer size 100000000"), "unsupported"),
    (KeyError("loss"), "crash"),
    (RuntimeError("CUDA error: unspecified launch failure"), "crash"),
    (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "crash"),
]


@pytest.mark.parametrize(("error", "outcome"), CAUSES, ids=lambda value: str(value)[:40])
def test_a_message_stands_for_its_outcome_and_is_a_cause(error: BaseException, outcome: OutcomeKind) -> None:
    assert classify(error, "cuda") == (outcome, False)


@pytest.mark.parametrize(
    "message",
    [
        "[gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:28170",
        "Read error [127.0.0.1]:1234: Connection reset by peer",
        "Rank 0: remote worker crashing",
        "NCCL communicator was aborted on rank 1.",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "remote process exited or there was a network error",
        "Application timeout caused pair closure",
    ],
)
def test_what_a_dying_peer_causes_is_a_consequence(message: str) -> None:
    assert classify(RuntimeError(message), "cuda") == ("crash", True)


@pytest.mark.parametrize("error", [RuntimeError(HOST_ALLOCATOR), MemoryError(), RuntimeError("can't start new thread")])
def test_on_the_cpu_device_the_ranks_own_limit_is_the_gpus_memory(error: BaseException) -> None:
    assert classify(error, "cpu") == ("gpu_oom", False)


@pytest.mark.parametrize(
    ("said", "outcome"),
    [("out of memory", "pinned_oom"), ("invalid argument", "pinned_oom"), ("unspecified launch failure", "crash")],
)
def test_the_same_words_from_pin_memory_are_pinned_host_memory_and_others_a_crash(said: str, outcome: str) -> None:
    def pin_memory() -> None:
        raise RuntimeError(f"CUDA error: {said}")

    with pytest.raises(RuntimeError) as raised:
        pin_memory()
    assert classify(raised.value, "cuda") == (outcome, False)


@pytest.mark.parametrize(
    ("message", "size"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 …", 2 * GIB),
        ("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; …)", 20 * MIB),
        ("CUDA out of memory. Tried to allocate 512 bytes.", 512),
        (HOST_ALLOCATOR, 134217728),
        ("CUDA error: out of memory", None),
        ("Tried to allocate some memory", None),
    ],
)
def test_the_bytes_asked_for_are_read_where_the_message_names_them(message: str, size: int | None) -> None:
    assert bytes_asked(RuntimeError(message)) == size
