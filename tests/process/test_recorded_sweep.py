"""benchmarks/record_sweep.py and its playback: what was recorded once answers for every smaller card."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from ladder.cli.main import main
from ladder.search.policy import auto, exhaustive
from ladder.units import GIB

CAPS = (141, 40)


class Bench(NamedTuple):
    """The benchmark's modules, and the folder with the one file recorded."""

    record_sweep: ModuleType
    recorded: ModuleType
    search_cases: ModuleType
    folder: Path


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("sweeps")
    run = ["--gpus", "4", "--machine", "h200", "--run-dir", str(tmp_path_factory.mktemp("run") / "run")]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        record, recorded, cases = map(importlib.import_module, ("record_sweep", "recorded", "search_cases"))
        assert record.main([str(folder / "7b.json"), "llama-2-7b", *run, "--caps", *map(str, CAPS)]) == 0
        yield Bench(record, recorded, cases, folder)


def sweeps(bench: Bench) -> dict[int, Any]:
    return {sweep.cap // GIB: sweep for sweep in bench.recorded.recorded_sweeps((4,), folder=bench.folder)}


def test_the_file_holds_every_candidate_and_a_probe_of_each_engine_that_fits(bench: Bench) -> None:
    (path,) = bench.folder.iterdir()
    facts = json.loads(path.read_text())
    assert len(facts["rows"]) > 80
    fitting = {row["rung"] for row in facts["rows"] if row["outcome"] == "fits"}
    assert {row["rung"] for row in facts["probes"]} == fitting
    assert facts["probe_layers"] == 4


def test_on_a_smaller_card_what_fits_is_a_part_of_what_fitted_and_as_fast(bench: Bench) -> None:
    large, small = (sweeps(bench)[cap].speeds() for cap in CAPS)
    assert 0 < len(small) < len(large)
    assert small.items() <= large.items()


def test_run_folders_of_some_rungs_each_are_joined_and_those_of_other_workloads_are_not(
    bench: Bench, tmp_path: Path
) -> None:
    folders = {}
    for name, rung, batch in (("a", "zero2", "16"), ("b", "zero3", "16"), ("c", "zero3", "32")):
        folders[name] = tmp_path / name
        paper = ["--gpus", "1", "--machine", "h200", "--rung", rung, "--global-batch-size", batch]
        assert (
            bench.record_sweep.main([str(tmp_path / "one.json"), "opt-125m", *paper, "--run-dir", str(folders[name])])
            == 0
        )
    joined = tmp_path / "joined.json"
    assert bench.record_sweep.main([str(joined), "--from", str(folders["a"]), str(folders["b"]), "--caps", "24"]) == 0
    facts = json.loads(joined.read_text())
    assert {row["rung"] for row in facts["rows"]} == {row["rung"] for row in facts["probes"]} == {"zero2", "zero3"}
    assert facts["caps_gib"] == [24.0]
    assert not facts["whole"], "of which nobody said that they are all rungs"
    again = tmp_path / "again.json"
    recorded = tmp_path / "one.json"
    assert bench.record_sweep.main([str(recorded), "--from", str(folders["a"])]) == 0
    assert bench.record_sweep.main([str(again), "--from", str(recorded), str(folders["b"]), "--caps", "24"]) == 0
    assert json.loads(again.read_text()) == facts, "what was recorded before is as good as its run folder"
    with pytest.raises(ValueError, match="different workloads"):
        bench.record_sweep.main([str(joined), "--from", str(folders["a"]), str(folders["c"])])


def test_candidates_with_other_knobs_are_no_rows_of_a_sweep(bench: Bench, tmp_path: Path) -> None:
    run = ["--run-dir", str(tmp_path / "run"), "--output", str(tmp_path / "best.json"), "--quiet", "--knobs", "3"]
    paper = ["--gpus", "2", "--launcher", "simulated", "--machine", "h200", "--rung", "zero2", "--no-liger"]
    assert main(["tune", "opt-125m", "--strategy", "exhaustive", *paper, *run]) == 0
    assert bench.record_sweep.main([str(tmp_path / "sweep.json"), "--from", str(tmp_path / "run"), "--whole"]) == 0
    facts = json.loads((tmp_path / "sweep.json").read_text())
    candidates = [(row["checkpointing"], row["micro_batch"]) for row in facts["rows"]]
    assert len(candidates) == len(set(candidates))
    assert facts["whole"]


def test_what_fits_under_a_real_cap_is_what_the_sweep_without_one_says(bench: Bench) -> None:
    """Two recordings of one model: one held to 24 GiB, one held to nothing."""
    recorded = {sweep.name: sweep for sweep in bench.recorded.recorded_sweeps((16,))}
    free = recorded["llama-3.2-1b-1xh200, 24.0 GiB, A 16"]
    held = recorded["llama-3.2-1b-1xh200-24gib-growing, 24 GiB, A 16"]
    both = free.rows.keys() & held.rows.keys()
    assert len(both) == 80
    wrong = {key for key in both if (free.needs(key) <= free.cap) != (held.rows[key]["outcome"] == "fits")}
    assert wrong == {"zero3 ckpt=on mb=1"}, "which needed 23.9 GiB and is said to need 24.4"


@pytest.mark.parametrize("cap", CAPS)
def test_the_search_finds_the_recorded_best_for_a_part_of_the_sweep_s_seconds(bench: Bench, cap: int) -> None:
    sweep = sweeps(bench)[cap]
    found, whole = (bench.search_cases.search(sweep, sweep.space(), strategy) for strategy in (auto, exhaustive))
    best = max((record.tokens_per_second or 0.0) for record in found.records if record.purpose == "measure")
    assert best >= 0.98 * max(sweep.speeds().values())
    assert found.search_seconds() < 0.5 * whole.search_seconds()
