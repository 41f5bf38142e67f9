"""A probe with real ranks: the same engine with a few of the model's layers, and what it says of the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from helpers import TINY_CONFIG, Bench, make_candidate
from helpers.tunes import tune_over

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.events.outcome import Record
from ladder.events.protocol import TrialSpec
from ladder.events.step_policy import StepPolicy
from ladder.search.decisions import Measure, Stop
from ladder.search.space import Space
from ladder.tuning.tune_events import TrialBegins, TuneEvent
from ladder.workload.shapes import shape_from_config
from ladder.workload.workload import Workload

DEEP = TINY_CONFIG | {"num_hidden_layers": 24}
CANDIDATE = make_candidate("zero2", micro_batch=1, accumulation=2)


def probe_then_measure(space: Space, records: Sequence[Record]) -> Measure | Stop:
    if len(records) == 2:
        return Stop("both are done")
    return Measure(CANDIDATE.engine, (CANDIDATE,), "asked for", probe=not records)


def test_a_probe_runs_few_layers_takes_less_time_and_is_not_the_answer(warm_bench: Bench, tmp_path: Path) -> None:
    workload = Workload(
        model=shape_from_config(DEEP, name="deep", source="file"), task="causal-lm", seq_len=64, global_batch_size=4
    )
    seen: list[TrialSpec] = []

    def tell(event: TuneEvent) -> None:
        if isinstance(event, TrialBegins):
            seen.append(event.spec)

    result = tune_over(
        warm_bench.launcher,
        tmp_path / "run",
        workload,
        strategy=probe_then_measure,
        rungs=[RUNGS_BY_NAME["zero2"]],
        micro_batches=(1,),
        tell=tell,
        steps=StepPolicy(maximum=5, seconds=1.0),
    )
    probe, whole, *proofs = result.records
    purposes = [record.purpose for record in result.records]
    assert purposes[:2] == ["probe", "measure"]
    assert set(purposes[2:]) == {"proof"}  # two, if the first was unlike the measurement
    assert [spec.model_config_json["num_hidden_layers"] for spec in seen] == [4, *[24] * (1 + len(proofs))]
    assert probe.measurement is not None
    assert whole.measurement is not None
    assert probe.measurement.boundary_seconds < whole.measurement.boundary_seconds
    assert probe.measurement.peak_allocated < whole.measurement.peak_allocated
    assert probe.tokens_per_second is None
    assert result.answer in proofs
