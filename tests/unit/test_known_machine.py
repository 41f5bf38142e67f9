"""What is known of a machine: kept by its facts, never mixed with another's, and doubted where it is far off."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from helpers.scripts import make_script, script_workload
from helpers.searches import BILLION, fitting, space_of

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Candidate, Engine
from ladder.machine.described import Machine
from ladder.machine.known_machine import facts_of, facts_of_nodes, file_of, keep_known, measured, read_known
from ladder.machine.machine_speed import known_speed, machine_speed
from ladder.machine.rates import Found, rates_of, slowest
from ladder.search.speed import SpeedObservation, calibrate_speed, lessons, predict_speed
from ladder.tuning.known import learn, with_known
from ladder.tuning.tune_events import Note
from ladder.units import GIB
from ladder.workload.lora import Lora
from ladder.workload.source import resolve_model
from ladder.workload.workload import Workload

FACTS = {"device": "cuda", "gpu": "NVIDIA H200", "ranks": 2, "driver": "580", "cores": 32, "cpu": "x", "torch": "2.11"}
POINTS: dict[str, list[dict[str, Any]]] = {
    "products": [{"operations": 4e12, "seconds": 0.008}, {"operations": 2e12, "seconds": 0.002}],
    "copies": [{"bytes": 4e9, "seconds": 0.001}],
    "launches": [{"seconds": 0.002}],
    "all_reduce": [{"bytes": 1e6, "seconds": 1e-4}, {"bytes": 1e9, "seconds": 0.005}],
    "all_gather": [{"bytes": 1e9, "seconds": 0.0025}],
    "pinned": [
        {"way": "up", "bytes": 1e9, "seconds": 0.02},
        {"way": "down", "bytes": 1e9, "seconds": 0.025},
        {"way": "both", "bytes": 1e9, "seconds": 0.05},
    ],
    "adam": [{"parameters": 8e6, "seconds": 0.008}],
}
H200 = machine_speed("NVIDIA H200", "cuda", 2, 32)
ZERO2 = Candidate(Engine(RUNGS_BY_NAME["zero2"]), 1, 4, 8)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LADDER_CACHE", str(tmp_path))


def cpu_machine(**changes: Any) -> Machine:
    plain = Machine(device="cpu", world_size=2, memory_limit=GIB, host_memory=8 * GIB, num_cores=4)
    return replace(plain, **changes)


def test_a_machine_that_takes_twice_as_long_has_half_the_rates() -> None:
    doubled = {name: [{**each, "seconds": 2 * each["seconds"]} for each in points] for name, points in POINTS.items()}
    fast, slow = rates_of(POINTS, 2), rates_of(doubled, 2)
    assert slow.pop("launch_seconds") == pytest.approx(2 * fast.pop("launch_seconds"))
    assert slow == pytest.approx({name: rate / 2 for name, rate in fast.items()})
    assert rates_of({"products": [{"operations": 0.0, "seconds": 1.0}]}, 1) == rates_of({}, 2) == {}
    assert fast.keys() - rates_of(POINTS, 1).keys() == {"link_bytes"}
    assert fast.keys() == {"flops", "device_bytes", "link_bytes", "pcie_bytes", "cpu_adam_parameters"}


def between_nodes() -> dict[str, list[dict[str, Any]]]:
    """Among four ranks on two nodes, collectives over both take ten times as long as within one."""
    longer = {name: [{**each, "seconds": 10 * each["seconds"]} for each in POINTS[name]] for name in POINTS}
    return {**POINTS, **{f"between_nodes_{name}": longer[name] for name in ("all_reduce", "all_gather")}}


def test_links_in_a_node_and_between_nodes_are_told_apart() -> None:
    rates = rates_of(between_nodes(), 4, 2)
    assert rates["link_bytes"] > 5 * rates["network_bytes"] > 0
    assert "network_bytes" not in rates_of(between_nodes(), 4, 1)
    assert "link_bytes" not in rates_of(between_nodes(), 2, 2), "with a rank on each node there is no link in one"


def test_the_slowest_node_counts_and_what_one_node_lacks_is_left_out() -> None:
    fast, slow = ([{"bytes": 1.0, "seconds": seconds}] for seconds in (1.0, 3.0))
    one = Found(rates={"copies": fast, "products": fast, "adam": fast}, failed={})
    other = Found(rates={"copies": slow, "products": fast}, failed={"adam": "no memory, on node b"})
    assert slowest([one, other]) == Found(
        rates={"copies": slow, "products": fast}, failed={"adam": "no memory, on node b"}
    )


def test_what_is_kept_is_read_again_by_the_same_facts_and_by_no_others() -> None:
    known = measured(FACTS, POINTS, ("/scratch", 3e9))
    assert keep_known(known)
    assert read_known(FACTS) == (known, "")
    for name in FACTS:
        assert read_known({**FACTS, name: "another"}) == (None, "")


def content(**changes: Any) -> str:
    return json.dumps({"version": 1, **asdict(measured(FACTS, POINTS, None)), **changes})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (lambda: "", "cannot be read"),
        (lambda: "[1]", "is damaged"),
        (lambda: content(version=99), "another version"),
        (lambda: content(rates={"flops": -1.0}), "is damaged"),
        (lambda: content(rates={"flops": math.nan}), "is damaged"),
        (lambda: content(learned={"compute": [0.1, 0.0]}), "is damaged"),
        (lambda: content(facts={**FACTS, "gpu": "NVIDIA A100"}), "another machine"),
        (lambda: content(measured_at=time.time() - 200 * 86400), "older than half a year"),
        (lambda: content(measured_at=time.time() + 86400), "from the future"),
    ],
)
def test_a_damaged_stale_or_foreign_file_is_ignored_in_one_sentence(text: Callable[[], str], words: str) -> None:
    file = file_of(FACTS)
    file.parent.mkdir(parents=True)
    file.write_text(text())
    known, sentence = read_known(FACTS)
    assert known is None
    assert words in sentence
    assert sentence.endswith("run `ladder doctor --measure`.")
    assert sentence.count(". ") == 0


def test_a_drive_counts_only_for_its_own_folder() -> None:
    facts = facts_of(cpu_machine())
    keep_known(measured(facts, POINTS, ("/scratch", 3e9)))
    same, other = (cpu_machine(nvme_path=Path(path)) for path in ("/scratch", "/elsewhere"))
    assert with_known(same, BILLION, lambda _: None).rates["nvme_bytes"] == 3e9
    assert "nvme_bytes" not in with_known(other, BILLION, lambda _: None).rates
    assert "nvme_bytes" not in with_known(cpu_machine(), BILLION, lambda _: None).rates


def two_nodes(*names: str, **changes: Any) -> Machine:
    first = {"driver": "580", "cpu": "x", "torch": "2.13"}
    return cpu_machine(**{"num_nodes": 2, "elsewhere": facts_of_nodes(names or ("node1", "node2"), first), **changes})


def test_the_figures_of_two_nodes_are_for_two_nodes_of_that_kind_whichever_the_job_gets() -> None:
    assert keep_known(measured(facts_of(two_nodes()), between_nodes(), None))
    others = with_known(two_nodes("node7", "node12"), BILLION, lambda _: None)
    assert others.rates["network_bytes"] == pytest.approx(2e10)
    for other in (cpu_machine(), two_nodes("gpu1", "gpu2"), two_nodes(num_cores=8), two_nodes(num_nodes=3)):
        assert with_known(other, BILLION, lambda _: None).rates == {}


def test_a_measurement_moves_the_speed_and_leaves_less_doubt_unless_it_is_far_off_the_data_sheet() -> None:
    known = known_speed(H200, {"flops": H200.flops * H200.achievable / 0.88, "link_bytes": 2e11}, {})
    assert known.achievable == pytest.approx(H200.achievable)
    assert known.link_bytes == 2e11
    for name, usual in (("compute", 0.35), ("reduce:2", 0.4)):
        assert known.belief(name, usual)[1] < 0.7 * usual
    assert known.belief("launch", 0.5) == (0.0, 0.5)  # it was not measured
    assert known_speed(H200, {"link_bytes": H200.link_bytes / 4}, {}).belief("gather", 0.4)[1] > 0.6
    assert known_speed(H200, {}, {}) is H200


def step_seconds(learned: dict[str, tuple[float, float]]) -> float:
    machine = known_speed(H200, {}, learned)
    return predict_speed(BILLION, ZERO2, world_size=2, machine=machine).accumulate_seconds


def test_what_one_tune_taught_moves_the_predictions_of_the_next() -> None:
    usual = step_seconds({})
    slower = SpeedObservation(candidate=ZERO2, boundary_seconds=2 * usual, accumulate_seconds=2 * usual)
    calibration = calibrate_speed(BILLION, [slower], world_size=2, machine=H200)
    learned = lessons(calibration, [ZERO2.engine.rung], {})
    assert usual < step_seconds(learned) < 2 * usual
    assert set(learned) <= {"compute", "launch", "reduce:2", "update:none"}
    assert all(0.5 <= deviation <= 1.0 for _, deviation in learned.values())


MIXTURE = resolve_model(str(Path(__file__).parents[2] / "benchmarks" / "models" / "mixture-of-experts-3b.json"))


@pytest.mark.parametrize(
    ("workload", "teaches"),
    [
        (BILLION, True),
        (replace(BILLION, lora=Lora(rank=8)), True),
        (replace(BILLION, model=MIXTURE), False),
        (script_workload(make_script()), False),
    ],
    ids=["a usual model", "its adapters", "a mixture of experts", "a script"],
)
def test_only_a_training_whose_speed_is_the_machine_s_teaches_something_about_it(
    tmp_path: Path, workload: Workload, teaches: bool
) -> None:
    space = space_of(workload=workload)
    candidate = next(each for each in space.candidates if each.engine.rung.name == "zero2")
    learn(cpu_machine(), space, [fitting(space, candidate, slower=1.5)], tmp_path / "run", lambda _event: None)
    known, _ = read_known(facts_of(cpu_machine()))
    assert (known is not None and bool(known.learned)) == teaches


def test_a_tune_is_told_of_an_ignored_file_and_starts_from_data_sheets() -> None:
    file = file_of(facts_of(cpu_machine()))
    file.parent.mkdir(parents=True)
    file.write_text("{")
    told: list[object] = []
    assert with_known(cpu_machine(), BILLION, told.append) == cpu_machine()
    assert [type(event) for event in told] == [Note]
