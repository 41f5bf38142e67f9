"""A probe with real ranks: the same engine with a few of the model's layers, and what it says of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from helpers import TINY_CONFIG, WORLD_SIZE, Bench, make_candidate

from ladder.candidates import RUNGS_BY_NAME
from ladder.history import History
from ladder.launch.base import TrialRun
from ladder.machine.machine import Machine
from ladder.model.shapes import shape_from_config
from ladder.outcome import Record
from ladder.protocol import Event, StepPolicy, TrialSpec
from ladder.search.decisions import Measure, Stop
from ladder.search.space import Space
from ladder.tuning.problem import make_space
from ladder.tuning.tuner import Tuner
from ladder.units import GIB
from ladder.workload import Workload

DEEP = TINY_CONFIG | {"num_hidden_layers": 24}
MACHINE = Machine(device="cpu", world_size=WORLD_SIZE, memory_limit=GIB, host_memory=8 * GIB, num_cores=2)
CANDIDATE = make_candidate("zero2", micro_batch=1, accumulation=2)


class Specs:
    """A view that keeps what the ranks were asked for."""

    def __init__(self) -> None:
        self.seen: list[TrialSpec] = []

    def note(self, text: str) -> None: ...
    def trial_begins(self, spec: TrialSpec, reason: str) -> None:
        self.seen.append(spec)

    def event(self, rank: int, event: Event) -> None: ...
    def trial_ends(self, run: TrialRun, records: Sequence[Record]) -> None: ...


def probe_then_measure(space: Space, records: Sequence[Record]) -> Measure | Stop:
    if len(records) == 2:
        return Stop("both are done")
    return Measure(CANDIDATE.engine, (CANDIDATE,), "asked for", probe=not records)


def test_a_probe_runs_few_layers_takes_less_time_and_is_not_the_answer(
    local_bench: Callable[..., Bench], tmp_path: Path
) -> None:
    workload = Workload(
        model=shape_from_config(DEEP, name="deep", source="file"), task="causal-lm", seq_len=64, global_batch_size=4
    )
    space, unsupported = make_space(workload, MACHINE, [RUNGS_BY_NAME["zero2"]], (1,))
    bench, view = local_bench(), Specs()
    try:
        with History(tmp_path / "run", "abc", {}) as history:
            result = Tuner(
                workload=workload,
                machine=MACHINE,
                space=space,
                unsupported=unsupported,
                history=history,
                launcher=bench.launcher,
                view=view,
                steps=StepPolicy(maximum=5, seconds=1.0),
            ).tune(probe_then_measure)
    finally:
        bench.launcher.close()
    probe, whole, proof = result.records
    assert [record.purpose for record in result.records] == ["probe", "measure", "proof"]
    assert [spec.model_config_json["num_hidden_layers"] for spec in view.seen] == [4, 24, 24]
    assert probe.measurement is not None
    assert whole.measurement is not None
    assert probe.measurement.boundary_seconds < whole.measurement.boundary_seconds
    assert probe.measurement.peak_allocated < whole.measurement.peak_allocated
    assert probe.tokens_per_second is None
    assert result.answer == proof
