"""The rungs that cannot work on a machine, each with the reason: before operators are built, and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ladder.backends.registry import backend_of
from ladder.candidates import Rung
from ladder.machine.described import Machine
from ladder.machine.interpreter import version_of
from ladder.machine.machine import unsupported_reason
from ladder.machine.nvme import nvme_shortage
from ladder.machine.versions import is_within
from ladder.tuning.operators import OperatorMissingError
from ladder.tuning.problem import place_obstacle
from ladder.workload.workload import Workload


def with_obstacles(machine: Machine, rungs: Sequence[Rung], workload: Workload) -> Machine:
    """The machine with the reasons for rungs that it does not support."""
    return replace(machine, unsupported=obstacles(rungs, machine, workload))


def without_operator(
    machine: Machine, rungs: Sequence[Rung], workload: Workload, missing: OperatorMissingError
) -> Machine:
    """The machine once it is known that an operator cannot be built there."""
    lost = {
        rung.name: str(missing)
        for rung in rungs
        if missing.name in backend_of(rung).operators(rung, workload.optimizer)
    }
    return replace(machine, unsupported={**lost, **machine.unsupported})


def obstacles(rungs: Sequence[Rung], machine: Machine, workload: Workload) -> dict[str, str]:
    """By rung name: why it cannot work on this machine, as far as is known before operators are built."""
    return {rung.name: reason for rung in rungs if (reason := _obstacle(rung, machine, workload)) is not None}


def missing_package(rung: Rung) -> str:
    """What has to be installed for `rung`, and is not; empty if nothing is missing."""
    package = backend_of(rung).package
    return package if package and not version_of(package) else ""


def flaw_of(rung: Rung, workload: Workload) -> str:
    """Why what is installed cannot train `rung`, or trains it wrongly; empty if it can."""
    if package := missing_package(rung):
        return f"{package} is not installed; `pip install {package}`"
    for flaw in backend_of(rung).flaws(workload):
        if flaw.concerns(workload, rung) and is_within(version := version_of(flaw.package), flaw.versions):
            return f"{flaw.package} {version} {flaw.why}; install another version than {flaw.versions}"
    return ""


def _obstacle(rung: Rung, machine: Machine, workload: Workload) -> str | None:
    if flaw := flaw_of(rung, workload):
        return flaw
    reason = place_obstacle(rung, machine, workload) or unsupported_reason(
        rung, machine, backend_of(rung).operators(rung, workload.optimizer)
    )
    if reason is None and machine.nvme_path is not None and machine.nvme_write_speed is not None:
        reason = nvme_shortage(rung, workload, machine.nvme_path, machine.nvme_write_speed)
    return reason
