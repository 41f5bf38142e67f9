"""The simulated machine: the same events as from real ranks, without a process and without waiting."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from helpers import as_a_rank_sees, bundled_workload

from ladder.backends.deepspeed.config import deepspeed_config
from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Candidate, Engine
from ladder.errors import UsageError
from ladder.events.protocol import TrialSpec
from ladder.events.step_policy import StepPolicy
from ladder.events.verdict import judge
from ladder.launch.base import Deadlines
from ladder.machine.machine_speed import peak_flops
from ladder.simulation.launcher import SimulatedLauncher
from ladder.simulation.paper_machine import machine_files, read_machine
from ladder.tuning.trial_request import trial_spec
from ladder.units import GIB

WORKLOAD = bundled_workload("llama-2-7b", seq_len=2048, global_batch_size=64)
A100 = read_machine("a100-80")


def make_trial(rung: str) -> tuple[TrialSpec, Candidate]:
    """Of one candidate, on four GPUs of 80 GiB."""
    engine = Engine(RUNGS_BY_NAME[rung])
    candidate = Candidate(engine, True, 1, 16)
    nvme = Path("/simulated") if "nvme" in engine.rung.devices else None
    config = deepspeed_config(WORKLOAD, engine, micro_batch=1, accumulation=2, world_size=4, nvme_path=nvme)
    seen, machine = [as_a_rank_sees(candidate)], A100.machine(4)
    spec = trial_spec("0001", Path("/nowhere"), WORKLOAD, machine, engine, config, seen, steps=StepPolicy())
    return dataclasses.replace(spec, memory_limit=80 * GIB), candidate


def test_every_bundled_machine_can_be_read_and_its_gpu_is_known():
    assert set(machine_files()) >= {"a100-40", "h100-80", "h200", "l4", "rtx-4090", "v100-32", "b200"}
    for name in machine_files():
        assert peak_flops(read_machine(name).gpu_name) is not None


@pytest.mark.parametrize("text", ["just words", "gpu_name: [", "gpu_name: X\n", "- 1\n- 2\n", "1: 2\n"])
def test_a_machine_file_that_makes_no_sense_is_one_sentence(tmp_path: Path, text: str):
    file = tmp_path / "it's a file.yaml"
    file.write_text(text)
    with pytest.raises(UsageError):
        read_machine(str(file))


@pytest.mark.parametrize(
    ("rung", "machine", "kind"),
    [
        ("zero0", {}, "gpu_oom"),
        ("zero2+opt-cpu", {"host_memory": 16 * GIB}, "host_oom"),
        ("zero3+opt-nvme", {"nvme_space": GIB}, "disk_full"),
        ("zero2", {"crash_rate": 1.0}, "crash"),
        ("zero2", {"hang_rate": 1.0}, "hang"),
    ],
)
def test_a_trial_fails_as_its_machine_is_told_to(rung: str, machine: dict[str, Any], kind: str):
    spec, candidate = make_trial(rung)
    launcher = SimulatedLauncher(A100.model_copy(update=machine))
    records = judge(launcher.run(spec, Deadlines(), lambda rank, event: None), WORKLOAD, [candidate])
    assert records[0].outcome.kind == kind
    if kind == "gpu_oom":
        assert records[0].outcome.moment == "engine"
