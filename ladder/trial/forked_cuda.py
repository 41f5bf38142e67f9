"""The check that ranks, which are forked from the trial server, can use CUDA: nothing in the server initialises it."""

from __future__ import annotations

import ctypes
import functools
import os
import traceback

import torch

_SUCCESS = 0
"""Derived: CUDA_SUCCESS. Before `cuInit`, the driver's functions return CUDA_ERROR_NOT_INITIALIZED."""
_touched_by: list[str] = []
"""Lines of Python code that made torch initialise CUDA."""


@functools.cache
def check_begun() -> ForkedCuda:
    """The one check of this process; the first call begins it."""
    return ForkedCuda()


class ForkedCuda:
    """Begins to use CUDA in a fork, which takes 0.3 to 0.4 s, while this process goes on."""

    def __init__(self) -> None:
        _note_who_touches_cuda()
        self._result, write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.write(write, _error_of_cuda().encode())
            os._exit(0)
        os.close(write)

    def fail_if_unusable(self) -> None:
        """RuntimeError if forked ranks cannot use CUDA, with the reason."""
        reason = self._reason_of_the_fork or _why_not_here()
        if not reason:
            return
        if _touched_by:
            raise RuntimeError(
                f"{_touched_by[0]} initialises CUDA, so forked ranks cannot use it; use an environment without that "
                f"package ({reason})"
            )
        raise RuntimeError(f"CUDA cannot be used in a forked process: {reason}")

    @functools.cached_property
    def _reason_of_the_fork(self) -> str:
        with os.fdopen(self._result) as pipe:
            reason = pipe.read()
        _, status = os.waitpid(self._pid, 0)
        return reason or (f"the fork ended with status {status}" if status else "")


def _error_of_cuda() -> str:
    try:
        torch.zeros(1, device="cuda")
    except Exception as error:
        return str(error).splitlines()[0]
    return ""


def _why_not_here() -> str:
    """Why a process that is forked now could not use CUDA; usually empty."""
    if torch.cuda.is_initialized():
        return "torch has initialised it"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    is_initialised = driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == _SUCCESS
    return "a package has initialised it without torch" if is_initialised else ""


def _note_who_touches_cuda() -> None:
    """From now on, record the lines of Python code that make torch initialise CUDA."""
    initialize = torch.cuda._lazy_init

    def noted() -> None:
        if not torch.cuda.is_initialized():
            _touched_by.append(_caller_outside(os.path.dirname(torch.__file__)))
        initialize()

    torch.cuda._lazy_init = noted


def _caller_outside(folder: str) -> str:
    """The innermost line on the stack that is neither in this file nor in `folder`: `/…/package/module.py:12`."""
    lines = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_stack()
        if frame.filename != __file__ and not frame.filename.startswith((folder + os.sep, "<"))
    ]
    return lines[-1] if lines else ""
