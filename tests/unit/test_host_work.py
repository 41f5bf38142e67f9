"""The host's part of a step before any trial: hooks of gradients, the optimizer's work on tensors, CPU Adam."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import bundled_workload, make_candidate

from ladder.backends.deepspeed.step_terms import step_terms
from ladder.machine.machine_speed import machine_speed

MACHINE = machine_speed("NVIDIA H200", "cuda", 1, 16)


@pytest.mark.parametrize(("model", "tensors"), [("llama-3.2-1b", 16 * 9), ("opt-1.3b", 24 * 16)])
@pytest.mark.parametrize(("rung", "milliseconds"), [("zero1", 0.05), ("zero2", 0.25)])
def test_each_gradient_costs_the_host_a_hook_in_every_micro_step(
    model: str, tensors: int, rung: str, milliseconds: float
) -> None:
    workload = bundled_workload(model)
    plain, hooked = (step_terms(workload, make_candidate(name), 1, MACHINE).launch for name in ("zero0", rung))
    assert hooked - plain == pytest.approx(tensors * milliseconds / 1000)


def test_an_optimizer_step_costs_the_host_for_each_tensor_however_fast_the_gpu_is() -> None:
    fast = replace(MACHINE, device_bytes=1e30)
    workload = bundled_workload("llama-3.2-1b")
    assert step_terms(workload, make_candidate("zero0"), 1, fast).update == pytest.approx(16 * 9 * 0.24e-3)


@pytest.mark.parametrize(("cores", "nodes", "billions"), [(16, 1, 1.76), (64, 1, 3.0), (128, 2, 6.0)])
def test_cores_update_parameters_until_the_nodes_memory_limits_them(cores: int, nodes: int, billions: float) -> None:
    speed = machine_speed("NVIDIA H200", "cuda", 4, cores, nodes)
    assert speed.cpu_adam_parameters == pytest.approx(billions * 1e9)
