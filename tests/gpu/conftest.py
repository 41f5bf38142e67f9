"""Warm servers on this machine's GPUs."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any

import pytest
from helpers import Bench

from ladder.launch.local import LocalLauncher
from ladder.machine.machine import detect_machine
from ladder.tuning.preparation import rank_environment


@pytest.fixture(scope="session")
def bench_on(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[int, dict[str, Any]], AbstractContextManager[Bench]]:
    """Makes benches on the first so many GPUs, for the model of a configuration."""

    @contextmanager
    def made(gpus: int, config: dict[str, Any]) -> Iterator[Bench]:
        machine = detect_machine(gpus=gpus, gpu_memory=None, host_memory=None, nvme_path=None)
        marker = f"ladder-test-{secrets.token_hex(8)}"
        launcher = LocalLauncher(
            marker=marker,
            job={"model_config": config, "task": "causal-lm", "operators": []},
            environment=rank_environment(machine),
            log=tmp_path_factory.mktemp("server") / "server.log",
            gpu_uuids=tuple(gpu.uuid for gpu in machine.gpus),
        )
        bench = Bench(launcher, [], marker)
        with closing(launcher):
            yield bench
        assert bench.processes() == []

    return made
