"""The comparison with other tools: what is run again, which columns follow, and how an Autotuner's folder is read."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import compare
import pytest
import ways
from agreed import CANNOT, CANNOT_RUN, OUT_OF_MEMORY
from autotuner import read_results
from compare import ROWS, figures
from hand_search import Row, searched
from side_by_side import TIME_OVER, Ended, Work, sizes
from unmodified import Training, logged_steps, tried_sizes
from ways import WAYS, WAYS_OF_A_SCRIPT

REAL = {"steps": 50, "tokens_per_second": 1000.0, "peak_device_gib": 6.0, "joules_per_token": 0.5}
FOUND: dict[str, Any] = {"seconds": 30.04, "failures": 2, "answer": {"micro_batch": 4}, "real": REAL}


def test_a_way_that_the_file_holds_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def way(work: Work, folder: Path, steps: int) -> dict[str, Any]:
        tried.append(work.model)
        return FOUND

    monkeypatch.setattr(compare, "WAYS", {"one": (way, []), "other": (way, [])})
    file = tmp_path / "results" / "cpu.json"
    assert len(compare.compare(file, "cpu", ["one"], 1, 50)) == len(tried) == 1
    records = compare.compare(file, "cpu", ["one", "other"], 2, 50)
    assert len(tried) == 4
    kept = [(each["way"], each["repetition"]) for each in records]
    assert kept == [("one", 1), ("other", 1), ("one", 2), ("other", 2)]
    assert compare.compare(file, "cpu", ["other"], 2, 50) == json.loads(file.read_text()) == records
    assert len(tried) == 4


def test_gpu_seconds_count_every_gpu_and_headroom_is_what_the_limit_leaves() -> None:
    columns = figures(Work(model="tiny-llama", gpus=4, cap_gib=24.0), FOUND)
    assert (columns["wall_seconds"], columns["gpu_seconds"], columns["headroom"]) == (30.0, 120.2, 0.75)
    assert columns["fifty_steps"] is True
    assert columns["why"] is None


def test_fewer_than_fifty_steps_leave_it_open_whether_so_many_run_and_none_at_all_deny_it() -> None:
    work = Work(model="tiny-llama")
    assert figures(work, FOUND | {"real": REAL | {"steps": 49}})["fifty_steps"] is None
    without = figures(work, {"seconds": 1.0, "why": "out of memory"})
    assert (without["fifty_steps"], without["tokens_per_second"], without["why"]) == (False, None, "out of memory")


def test_rows_under_a_limit_have_a_batch_that_their_gpus_share_evenly() -> None:
    assert [name for name, work in ROWS.items() if work.batch % work.gpus] == []
    assert replace(ROWS["llama-2-7b-76gib-2"], cap_gib=40) == ROWS["llama-2-7b-40gib-2"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the Autotuner of DeepSpeed 0.19.8 left of a fast search on two CPU ranks, without its logs."""
    shutil.copytree(Path(__file__).parents[1] / "data" / "autotuner", tmp_path / "autotuner")
    return tmp_path / "autotuner"


def test_where_no_experiment_of_the_autotuner_runs_it_starts_once_more_with_checkpointing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[tuple[float, bool]]()

    def autotune(work: Work, folder: Path, fast: bool, longest: float, *, checkpointing: bool) -> dict[str, Any]:
        asked.append((longest, checkpointing))
        chosen = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 4, "zero_optimization": {"stage": 3}}
        found = {"seconds": 100.0, "failures": 4, "experiments": 4, "failed": {"z0": "out of memory"}, "finished": True}
        return found | {"chosen": chosen, "samples_per_second": {"z3": 1.0} if checkpointing else {}}

    monkeypatch.setattr(ways, "autotune", autotune)
    monkeypatch.setattr(ways, "_real", lambda *arguments, **more: {"real": arguments[1:4]})
    found = ways.of_deepspeed(fast=True)(Work(model="any"), tmp_path, 20)
    assert asked == [(450.0, False), (350.0, True)]
    assert (found["seconds"], found["failures"], found["experiments"]) == (200.0, 8, 8)
    assert found["answer"] == {"stage": 3, "micro_batch": 2, "batch": 4, "checkpointing": True}
    assert found["real"] == ("deepspeed", True, 2)


def test_the_autotuner_s_own_choice_is_read_without_its_section(folder: Path) -> None:
    read = read_results(folder)
    assert (read["experiments"], read["failures"], read["finished"]) == (6, 0, True)
    assert read["chosen"]["zero_optimization"] == {"stage": 2}
    assert read["chosen"]["train_micro_batch_size_per_gpu"] == 2
    assert "autotuning" not in read["chosen"]
    assert len(read["samples_per_second"]) == 6
    assert read["samples_per_second"]["z3_gas1_tmbspg2"] == pytest.approx(28.33, abs=0.01)


def test_where_the_autotuner_did_not_come_to_choose_its_fastest_experiment_counts(folder: Path) -> None:
    (folder / "autotuning_results" / "ds_config_optimal.json").unlink()
    read = read_results(folder)
    assert read["finished"] is False
    assert read["chosen"]["zero_optimization"] == {"stage": 0}
    assert read["chosen"]["train_micro_batch_size_per_gpu"] == 1


def test_failed_experiments_are_told_with_their_last_error(folder: Path) -> None:
    results = folder / "autotuning_results"
    shutil.rmtree(results / "z0_gas1_tmbspg1")
    (results / "z1_gas1_tmbspg2" / "metrics.json").unlink()
    (results / "z1_gas1_tmbspg2" / "stderr.log").write_text("Traceback\ntorch.OutOfMemoryError: CUDA\n  frame\n")
    read = read_results(folder)
    assert read["failures"] == 2
    assert read["failed"]["z0_gas1_tmbspg1"] == "it was never started"
    assert read["failed"]["z1_gas1_tmbspg2"] == "torch.OutOfMemoryError: CUDA"


def test_an_experiment_that_was_cut_off_with_the_search_has_not_failed(folder: Path) -> None:
    results = folder / "autotuning_results"
    for cut in ("ds_config_optimal.json", "summary.txt", "z3_gas1_tmbspg2/metrics.json"):
        (results / cut).unlink()
    (results / "z2_gas1_tmbspg2" / "metrics.json").unlink()
    (results / "z2_gas1_tmbspg2" / "stderr.log").write_text("RuntimeError: it broke\n")
    assert read_results(folder)["failed"] == {"z2_gas1_tmbspg2": "RuntimeError: it broke"}


def test_a_folder_without_any_result_has_no_choice(tmp_path: Path) -> None:
    read = read_results(tmp_path)
    assert (read["chosen"], read["finished"], read["experiments"]) == (None, False, 0)


def test_how_a_rank_ended_is_told_whether_torchrun_started_it_or_not() -> None:
    assert Ended(OUT_OF_MEMORY, 1.0, "").why == "out of memory"
    assert Ended(1, 1.0, f"Root Cause:\n  exitcode  : {OUT_OF_MEMORY} (pid: 7)\n").why == "out of memory"
    said = f"{CANNOT}it is not installed.\n  exitcode  : {CANNOT_RUN} (pid: 7)\n"
    assert Ended(1, 1.0, said).why == f"{CANNOT}it is not installed."
    assert Ended(1, 1.0, "Traceback").why == "Traceback"


LOG = """1.0 Total train batch size (w. parallel, distributed & accumulation) = 1,024
1.5 torch.OutOfMemoryError: CUDA out of memory.
2.0 Total train batch size (w. parallel, distributed & accumulation) = 512
10.0 {'loss': '6.209', 'grad_norm': '12', 'num_tokens': '1.5e+04', 'epoch': '0.002'}
12.0 {'loss': '6.206', 'grad_norm': '12', 'num_tokens': '2.5e+04', 'epoch': '0.004'}
15.0 {'loss': '6.206', 'grad_norm': '12', 'num_tokens': '3.5e+04', 'epoch': '0.006'}
15.1 {'train_runtime': '10.07', 'train_loss': '6.213', 'epoch': '0.006'}
"""


def test_a_program_s_own_logging_gives_the_speed_after_its_first_step() -> None:
    training = Training(5.0, Ended(0, 20.0, LOG), 7.5, logged_steps(LOG))
    assert training.tokens_per_second == 4000.0
    assert training.seconds == 10.0  # what it does after its last step is left out
    assert training.why is None
    assert training.real(8) == {
        "steps": 3,
        "tokens_per_second": 4000.0,
        "micro_batch": 8,
        "peak_device_gib": 7.5,
    }


def test_a_program_that_failed_has_no_speed_however_far_it_came() -> None:
    training = Training(5.0, Ended(1, 20.0, LOG), 7.5, logged_steps(LOG))
    assert (training.tokens_per_second, training.why, training.real(8)) == (None, "out of memory", None)


def test_a_search_by_hand_that_was_cut_off_goes_on_with_the_time_that_the_others_left() -> None:
    asked = list[tuple[str, list[int]]]()

    def attempt(search: str, micro_batches: list[int], longest: float) -> tuple[list[Row], float]:
        asked.append((search, micro_batches))
        if search == "fails":
            return [{"ended": "out of memory"}], 10.0
        fitting = micro_batches[: int(longest // 50.0)]
        is_over = len(fitting) < len(micro_batches)
        rows: list[Row] = [{"micro_batch": size, "tokens_per_second": float(size)} for size in fitting]
        return [*rows, {"ended": f"{TIME_OVER} after {longest} s"}] if is_over else rows, 50.0 * len(fitting)

    sizes = [1, 2, 4, 8, 16]
    found = searched(["long", "fails"], sizes, attempt)
    assert asked == [("long", sizes), ("fails", sizes), ("long", [8, 16])]
    assert found.best == {"micro_batch": 16, "tokens_per_second": 16.0}
    assert found.told() == {"seconds": 260.0, "failures": 1, "failed": ["out of memory"], "finished": True}
    cut_off = searched(["long", "longer"], [*sizes, 32, 64, 128, 256], attempt)
    assert (cut_off.finished, cut_off.told()["failures"]) == (False, 0)
    nothing = searched(["fails"], sizes, attempt)
    assert (nothing.best, nothing.finished, nothing.told()["why"]) == (None, True, "out of memory")


def test_the_sizes_that_a_finder_tried_are_those_of_one_gpu() -> None:
    assert tried_sizes(LOG, gpus=2) == [512, 256]
    assert sizes(Work(model="any", gpus=2, batch=24)) == [1, 2, 4]


def test_an_unmodified_program_has_its_own_ways_and_no_other(tmp_path: Path) -> None:
    assert set(WAYS_OF_A_SCRIPT) < set(WAYS)
    assert compare.compare(tmp_path / "sft.json", "sft", ["lightning"], 1, 50) == []
