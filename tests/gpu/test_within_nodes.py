"""What keeps exchanges inside a node, on four GPUs as on two nodes: it trains like the plain rung."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from helpers import FOUR_LAYERS_CONFIG, tiny_trial

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Engine, Technique
from ladder.machine.gpus import visible_gpus
from ladder.techniques.hpz import Hpz
from ladder.techniques.hybrid import Hybrid
from ladder.tuning.parity import compare, losses_of, parity_trial
from ladder.units import GIB
from ladder.workload.shapes import shape_from_config

RANKS, OF_A_NODE = 4, 2
CONFIG = {**FOUR_LAYERS_CONFIG, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 2}
CONFIG |= {"num_attention_heads": 32, "num_key_value_heads": 32}
WIDE = shape_from_config(CONFIG, name="wide", source="file")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(len(visible_gpus()) < RANKS, reason="needs four CUDA GPUs"),
    pytest.mark.timeout(600),
]
Losses = Callable[[str, Technique | None], list[float]]


@pytest.fixture(scope="module")
def losses(bench_on: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Losses]:
    """The losses of a rung with a technique, of layers as wide as those of Llama-2-7B, with full batches."""
    folder, number = tmp_path_factory.mktemp("trials"), iter(range(1, 100))
    uuids = tuple(gpu.uuid for gpu in visible_gpus()[:RANKS])
    on_gpus: dict[str, Any] = {"device": "cuda", "gpu_uuids": uuids, "memory_limit": 40 * GIB, "seq_len": 1024}
    with bench_on(RANKS, CONFIG) as bench:

        def measured(rung: str, technique: Technique | None = None) -> list[float]:
            trial = folder / f"{next(number):04d}"
            spec = tiny_trial(trial, 4, rung=rung, technique=technique, ranks=RANKS, accumulation=3)
            return losses_of(bench.run(parity_trial(replace(spec, **on_gpus), WIDE)))

        yield measured


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
