"""What keeps exchanges inside a node, with four real ranks as on two nodes: it trains like the plain rung."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TINY, Bench, space_on, tiny_trial
from helpers.tunes import TWO_RANKS

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Engine, Technique
from ladder.events.protocol import DoneEvent, FailedEvent, PhaseEvent, TrialSpec
from ladder.runs.history import History
from ladder.search.policy import exhaustive
from ladder.techniques.hpz import HPZ, Hpz
from ladder.techniques.hybrid import Hybrid
from ladder.trial.techniques import techniques_of
from ladder.tuning.comparisons import Comparisons
from ladder.tuning.parity import compare, losses_of, parity_trial
from ladder.tuning.tune_events import TrialBegins, TuneEvent
from ladder.tuning.tuner import Tuner
from ladder.workload.lora import Lora
from ladder.workload.workload import Workload

RANKS, OF_A_NODE = 4, 2


def trial(folder: Path, rung: str, technique: Technique | None = None, **changes: Any) -> TrialSpec:
    return tiny_trial(folder, 1, rung=rung, technique=technique, ranks=RANKS, accumulation=3, **changes)


def losses(bench: Bench, spec: TrialSpec) -> list[float]:
    return losses_of(bench.run(parity_trial(spec, TINY)))


@pytest.fixture(scope="module")
def plain(warm_bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the rung that others are compared with."""
    found = losses(warm_bench, trial(tmp_path_factory.mktemp("plain") / "0001", "zero1"))
    assert found[-1] < 0.96 * found[0]  # so there is something to compare
    return found


@pytest.mark.parametrize("live", [pytest.param(1_000_000_000, marks=pytest.mark.night), 0])
def test_with_a_copy_of_the_weights_in_each_node_stage_3_trains_as_the_plain_rung(
    warm_bench: Bench, tmp_path: Path, plain: list[float], live: int
) -> None:
    """Also if nothing stays gathered, so that every use reads the copies."""
    spec = trial(tmp_path / "0001", "zero3", Hpz(OF_A_NODE))
    few = dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), live)
    zero = spec.deepspeed["zero_optimization"] | few | {"stage3_param_persistence_threshold": 0}
    own = losses(warm_bench, spec.model_copy(update={"deepspeed": spec.deepspeed | {"zero_optimization": zero}}))
    assert own == pytest.approx(plain, rel=0.002)


@pytest.mark.night
def test_adapters_train_alike_where_the_copies_of_frozen_weights_stay(warm_bench: Bench, tmp_path: Path) -> None:
    adapters = Lora(rank=8, alpha=16).for_peft()
    usual = losses(warm_bench, trial(tmp_path / "0001", "zero1", lora=adapters))
    own = losses(warm_bench, trial(tmp_path / "0002", "zero3", Hpz(OF_A_NODE), lora=adapters))
    assert compare(own, usual, Engine(RUNGS_BY_NAME["zero3"])).agrees is True


@pytest.mark.night
def test_a_tune_over_two_nodes_compares_the_losses_of_an_engine_with_copies_and_proves_it(
    warm_bench: Bench, tmp_path: Path
) -> None:
    workload = Workload(model=TINY, task="causal-lm", seq_len=64, global_batch_size=16)
    machine = replace(TWO_RANKS, world_size=RANKS, num_nodes=RANKS // OF_A_NODE)
    space, unsupported = space_on(workload, machine, [RUNGS_BY_NAME["zero3"]], (1,), techniques=[HPZ])
    copies = replace(space, engines=tuple(engine for engine in space.engines if engine.has(HPZ)))
    begun: list[TrialSpec] = []

    def listen(event: TuneEvent) -> None:
        if isinstance(event, TrialBegins):
            begun.append(event.spec)

    with History(tmp_path, "abc", {}) as history:
        result = Tuner(
            workload=workload,
            machine=machine,
            space=copies,
            unsupported=unsupported,
            history=history,
            launcher=warm_bench.launcher,
            tell=listen,
            comparisons=Comparisons(),
        ).tune(exhaustive)
    proofs = [record for record in result.records if record.purpose == "proof"]
    assert [record.outcome.kind for record in proofs] == ["fits"]
    assert proofs[0].candidate_key.startswith("zero3+hpz=2 ")
    compared = [spec for spec in begun if spec.parity]
    assert [spec.deepspeed["zero_optimization"].get("zero_hpz_partition_size") for spec in compared] == [None, 2]
    assert {spec.deepspeed["gradient_accumulation_steps"] for spec in compared} == {2}
    assert [technique.first_differs for technique in techniques_of(begun[0])] == [HPZ.first_differs]
    assert not any("not compared" in warning for warning in proofs[0].warnings)


def test_a_rank_whose_deepspeed_keeps_no_copy_says_so(warm_bench: Bench, tmp_path: Path) -> None:
    spec = trial(tmp_path / "0001", "zero3", Hpz(1))  # DeepSpeed's default
    run = warm_bench.run(spec)
    failed = next(event for event in run.events[0] if isinstance(event, FailedEvent))
    assert "no copy of the weights" in failed.message


@pytest.mark.parametrize("rung", ["fsdp2", pytest.param("fsdp2+no-reshard", marks=pytest.mark.night)])
def test_weights_divided_within_each_node_train_as_those_divided_over_all_ranks(
    warm_bench: Bench, tmp_path: Path, plain: list[float], rung: str
) -> None:
    own = losses(warm_bench, trial(tmp_path / "0001", rung, Hybrid(OF_A_NODE)))
    assert compare(own, plain, Engine(RUNGS_BY_NAME[rung])).agrees is True
    whole = losses(warm_bench, trial(tmp_path / "0002", rung))
    assert own == pytest.approx(whole, rel=0.01)


@pytest.mark.parametrize(("rung", "technique"), [("zero3", Hpz(OF_A_NODE)), ("fsdp2", Hybrid(OF_A_NODE))])
def test_the_whole_weights_are_evaluated_and_saved(
    warm_bench: Bench, tmp_path: Path, rung: str, technique: Technique
) -> None:
    spec = trial(tmp_path / "0001", rung, technique, proof=True, save_folder=str(tmp_path))
    run = warm_bench.run(spec)
    for events in run.events:
        assert isinstance(events[-1], DoneEvent)
        assert {"evaluation", "gather"} <= {event.phase for event in events if isinstance(event, PhaseEvent)}
    saved = next(path for path in tmp_path.iterdir() if path.suffix in (".bin", ".safetensors"))
    if saved.suffix == ".bin":
        weights = torch.load(saved, weights_only=True)
    else:
        from safetensors.torch import load_file

        weights = load_file(saved)
    assert sum(weight.numel() for weight in weights.values()) == TINY.num_parameters
