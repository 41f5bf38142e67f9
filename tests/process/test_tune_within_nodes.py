"""What keeps exchanges inside a node is compared and proven in a tune: four real ranks, as on two nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers import TINY, Bench, space_on
from helpers.tunes import TWO_RANKS

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.events.protocol import TrialSpec
from ladder.runs.history import History
from ladder.search.policy import exhaustive
from ladder.techniques.hpz import HPZ
from ladder.trial.techniques import techniques_of
from ladder.tuning.comparisons import Comparisons
from ladder.tuning.tune_events import TrialBegins, TuneEvent
from ladder.tuning.tuner import Tuner
from ladder.workload.workload import Workload

RANKS, OF_A_NODE = 4, 2


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
