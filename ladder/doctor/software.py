"""Checks of Python packages, torch and the driver, NCCL, the compiler and DeepSpeed's operators."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from collections.abc import Iterator
from typing import Any

from packaging.requirements import Requirement

from ladder.doctor.builds import fix_of_build
from ladder.doctor.check import Check, fail, ok, unseen, warn
from ladder.launch.modules import asked
from ladder.launch.operator_builds import build_operators
from ladder.launch.protecting import protection_here
from ladder.machine.host import compiler
from ladder.machine.interpreter import own_version_of, program_found, version_of
from ladder.machine.versions import RANGES, is_within
from ladder.text import shown

# DeepSpeed's operators, and what needs them.
_OPERATORS = {"shm_comm": "every trial on the CPU", "cpu_adam": "optimizer offload", "async_io": "NVMe offload"}
_OWN = ("optuna", "huggingface-hub", "nvidia-ml-py")
_TORCH_SECONDS = 120.0
"""Time to import torch and initialise CUDA. Chosen: five times the 23 s that the imports for trials took on the slowest
host so far (measured: benchmarks/results/4xh200-beyond-the-ladder)."""
_DISTRIBUTION = "oom-ladder"
"""The name of the package for pip; the import and the command are `ladder`."""


def packages() -> Iterator[Check]:
    """Whether installed versions are within the ranges that this ladder works with."""
    wanted = dict(RANGES)
    try:
        needs = importlib.metadata.requires(_DISTRIBUTION) or ()
    except importlib.metadata.PackageNotFoundError:
        yield warn(
            "ladder", "is not installed, so the versions that it needs itself are not checked", "pip install '.[train]'"
        )
        needs = ()
    for line in needs:
        requirement = Requirement(line)
        if requirement.marker is None:
            wanted[requirement.name] = str(requirement.specifier)
    for name in (*RANGES, *_OWN):
        versions = wanted.get(name, "")
        version = version_of(name) if name in RANGES else own_version_of(name)
        if not version:
            severity, without = (warn, "; DDP and FSDP2 train without") if name == "deepspeed" else (fail, "")
            yield severity(name, f"is not installed{without}", f"pip install '{name}{versions}'")
        elif is_within(version, versions):
            yield ok(name, version, version=version)
        else:
            yield fail(name, f"{version} is outside {versions}", f"pip install '{name}{versions}'", version=version)


def torch_and_driver(driver_cuda: tuple[int, int] | None) -> Iterator[Check]:
    """Whether torch's CUDA works with the newest version that the driver supports (None: no driver), and NCCL."""
    try:
        about = about_torch()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        yield fail("torch", f"cannot be imported: {shown(str(error)[-300:])}", "pip install --force-reinstall torch")
        return
    built_for = about["cuda"]
    if driver_cuda is None:
        yield _on_cpus(about)
        return
    if built_for is None:
        fix = "install a CUDA build of torch: pip install torch --index-url https://download.pytorch.org/whl/cu128"
        yield fail("torch and CUDA", "torch is built for the CPU only, but there are GPUs", fix, **about)
        return
    version = tuple(int(part) for part in built_for.split(".")[:2])
    if version[0] > driver_cuda[0]:
        supported = f"{driver_cuda[0]}.{driver_cuda[1]}"
        sentence = f"torch is built for CUDA {built_for}, but the driver supports only up to {supported}"
        yield fail("torch and CUDA", sentence, "update the NVIDIA driver, or install an older build of torch", **about)
    elif not about["cuda_works"]:
        fix = "check nvidia-smi and CUDA_VISIBLE_DEVICES, and reboot if the driver was updated"
        yield fail("torch and CUDA", f"torch cannot use CUDA: {about['cuda_error']}", fix, **about)
    else:
        yield ok("torch and CUDA", f"torch built for CUDA {built_for}, driver up to {driver_cuda[0]}.{driver_cuda[1]}")
    if about["nccl"] is None:
        yield fail("NCCL", "this torch has no NCCL, which several GPUs need", "install the CUDA build of torch")
    else:
        yield ok("NCCL", about["nccl"], version=about["nccl"])


def _on_cpus(about: dict[str, Any]) -> Check:
    """Where there is no GPU. Without AVX-512, bf16 reaches 0.8 GFLOP/s beside 43 in fp32 (measured, two cores)."""
    built_for = f"CUDA {about['cuda']}" if about["cuda"] is not None else "the CPU"
    sentence = f"torch is built for {built_for}, and there is no GPU here"
    if not about["cpu_bf16"]:
        sentence += "; this CPU multiplies bf16 slowly, so a tune on it takes minutes even of a tiny model"
    return ok("torch and CUDA", sentence, **about)


def about_torch() -> dict[str, Any]:
    """What torch can do here. Asked in another process, so that this one neither imports torch nor uses CUDA.

    OSError or subprocess.TimeoutExpired if it does not answer.
    """
    try:
        said = asked("ladder.trial.about", seconds=_TORCH_SECONDS)
    except subprocess.CalledProcessError as error:
        raise OSError((error.stderr.strip().splitlines() or ["it ended without a message"])[-1]) from None
    about: dict[str, Any] = json.loads(said.splitlines()[-1])
    return about


def compilers() -> Iterator[Check]:
    """A C++ compiler and ninja, with which DeepSpeed compiles its operators."""
    for name, program, fix in (
        ("compiler", compiler(), "apt-get install g++ (Debian, Ubuntu), or set CXX"),
        ("ninja", "ninja", "pip install ninja, and run ladder with the environment's bin folder on PATH"),
    ):
        found = program_found(program)
        if found is None:
            rungs = "optimizer offload, NVMe and CPU ranks need it"
            yield warn(name, f"{shown(program)} is missing; {rungs}", fix)
        else:
            yield ok(name, found)


def operators(*, build: bool, on_gpus: bool) -> Iterator[Check]:
    """DeepSpeed's operators: builds them if `build`, and otherwise only says how to."""
    names = [name for name in _OPERATORS if name != "shm_comm" or not on_gpus]
    if not version_of("deepspeed"):
        yield ok("operators", "none, as DeepSpeed is not installed")
        return
    if not build:
        yield unseen("operators", f"not tried: `ladder doctor --build` builds {', '.join(names)}")
        return
    accelerator = {"DS_ACCELERATOR": "cuda" if on_gpus else "cpu"}
    for name, reason in build_operators(names, accelerator).items():
        needed = _OPERATORS[name]
        if reason is None:
            yield ok(f"operator {name}", f"is built and loads ({needed})")
        else:
            fix = fix_of_build(name, reason)
            severity = fail if name == "shm_comm" else warn
            yield severity(f"operator {name}", f"cannot be built ({shown(reason)}); {needed} needs it", fix)


def protection() -> Iterator[Check]:
    """What keeps a user's files from trials of the user's own script."""
    found = protection_here()
    facts = {"level": found.level, "why": found.why}
    if found.level == "overlay":
        yield ok("trials of scripts", "overlay: what a script writes in a trial is thrown away", **facts)
    elif found.level == "landlock":
        sentence = "Landlock: in a trial, a script may write only in a copy of its folder and in caches"
        yield ok("trials of scripts", f"{sentence} ({found.why})", **facts)
    else:
        sentence = "nothing keeps your files from what a script does before its training in a trial"
        fix = (
            "allow user namespaces (user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns), or use a "
            "kernel with Landlock; in a container, also allow their system calls (--security-opt seccomp=…)"
        )
        yield warn("trials of scripts", f"{sentence} ({found.why})", fix, **facts)
