"""What keeps exchanges inside a node, on four GPUs as on two nodes: it trains like the plain rung."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

import pytest
from helpers import tiny_trial

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Engine, Technique
from ladder.events.trial_run import TrialRun
from ladder.launch.base import Deadlines
from ladder.launch.local import LocalLauncher
from ladder.machine.gpus import visible_gpus
from ladder.machine.machine import detect_machine
from ladder.techniques.hpz import Hpz
from ladder.techniques.hybrid import Hybrid
from ladder.tuning.parity import compare, losses_of, parity_trial
from ladder.tuning.preparation import rank_environment
from ladder.units import GIB
from ladder.workload.shapes import shape_from_config

RANKS, OF_A_NODE = 4, 2
CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
WIDE = shape_from_config(CONFIG, name="wide", source="file")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(len(visible_gpus()) < RANKS, reason="needs four CUDA GPUs"),
    pytest.mark.timeout(600),
]
Losses = Callable[[str, Technique | None], list[float]]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Losses]:
    """The losses of a rung with a technique, of layers as wide as those of Llama-2-7B, with full batches."""
    machine = detect_machine(gpus=RANKS, gpu_memory=None, host_memory=None, nvme_path=None)
    folder = tmp_path_factory.mktemp("trials")
    uuids = tuple(gpu.uuid for gpu in machine.gpus)
    launcher = LocalLauncher(
        marker=f"ladder-test-{secrets.token_hex(8)}",
        job={"model_config": CONFIG, "task": "causal-lm", "operators": []},
        environment=rank_environment(machine),
        log=folder / "server.log",
        gpu_uuids=uuids,
    )
    number = iter(range(1, 100))

    def measured(rung: str, technique: Technique | None = None) -> list[float]:
        spec = tiny_trial(
            folder / f"{next(number):04d}", 4, rung=rung, technique=technique, ranks=RANKS, accumulation=3
        )
        on_gpus = {"device": "cuda", "gpu_uuids": uuids, "memory_limit": 40 * GIB, "seq_len": 1024}
        run: TrialRun = launcher.run(
            parity_trial(spec.model_copy(update=on_gpus), WIDE), Deadlines(), lambda rank, event: None
        )
        return losses_of(run)

    yield measured
    launcher.close()


@pytest.mark.parametrize(
    ("rung", "technique"),
    [("zero3", Hpz(OF_A_NODE)), ("fsdp2", Hybrid(OF_A_NODE)), ("fsdp2+no-reshard", Hybrid(OF_A_NODE))],
)
def test_losses_agree_with_those_of_the_plain_rung_and_of_the_same_one_without(
    losses: Losses, rung: str, technique: Technique
) -> None:
    plain, without, own = losses("zero1", None), losses(rung, None), losses(rung, technique)
    engine = Engine(RUNGS_BY_NAME[rung]).having(technique)
    assert compare(own, plain, engine).agrees is True
    assert own == pytest.approx(without, rel=0.01)
