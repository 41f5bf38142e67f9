"""The trial server outlives its trials: a thousand that fail leave nothing in it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from helpers import Bench

from ladder.backends.deepspeed.config import deepspeed_config
from ladder.backends.registry import RUNGS_BY_NAME, backend_of
from ladder.candidates import Engine
from ladder.events.protocol import FailedEvent, TrialSpec
from ladder.events.step_policy import CandidateSpec
from ladder.launch.local import LocalLauncher
from ladder.units import MIB
from ladder.workload.source import resolve_model
from ladder.workload.workload import Workload

NUM_TRIALS = 300


def failing_spec(name: str, folder: Path) -> TrialSpec:
    """A trial whose rank fails at once: it is to measure a GPU that does not exist."""
    workload = Workload(model=resolve_model("tiny-llama"), task="causal-lm", seq_len=32, global_batch_size=1)
    engine = Engine(RUNGS_BY_NAME["zero2"])
    return TrialSpec(
        trial=name,
        folder=str(folder),
        device="cuda",
        world_size=1,
        gpu_uuids=("GPU-there-is-none",),
        model_config_json=dict(workload.model.config),
        task="causal-lm",
        seq_len=32,
        optimizer="adamw",
        optimizer_module="ladder.trial.optimizers.adamw",
        dtype="bf16",
        backend_module=backend_of(engine.rung).rank_module,
        deepspeed=deepspeed_config(workload, engine, micro_batch=1, accumulation=1, world_size=1, nvme_path=None),
        candidates=(CandidateSpec(key="zero2 ckpt=on mb=1", checkpoint_every=1, micro_batch=1, accumulation=1),),
        memory_limit=MIB,
    )


@pytest.mark.timeout(300)
def test_hundreds_of_failing_trials_leak_no_process_no_descriptor_and_no_memory_in_the_server(tmp_path: Path) -> None:
    marker = f"ladder-leak-test-{tmp_path.name}"
    launcher = LocalLauncher(
        marker=marker,
        job={"model_config": dict(resolve_model("tiny-llama").config), "task": "causal-lm", "operators": []},
        environment={"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        log=tmp_path / "server.log",
    )
    bench = Bench(launcher, [], marker)
    try:
        before: tuple[int, int] | None = None
        for index in range(NUM_TRIALS):
            run = bench.run(failing_spec(f"{index}", tmp_path / f"{index}"))
            assert any(isinstance(event, FailedEvent) for event in run.events[0]), "the trial was to fail by itself"
            server = bench.server()
            before = before or (server.num_fds(), server.memory_info().rss)
        assert server.children(recursive=True) == []
        assert before is not None
        assert server.num_fds() == before[0]
        assert server.memory_info().rss - before[1] < 8 * MIB
        assert psutil.Process().num_fds() < 200
    finally:
        launcher.close()
    assert not psutil.pid_exists(server.pid)
