"""Bound cores: which a rank gets, where it is tried, and what the launch script does."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import bundled_workload, machine_with
from helpers.answers import answer

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.emit.files import OutputPaths
from ladder.emit.launch import launch_script
from ladder.machine.cores import by_place
from ladder.techniques.bound_cores import BIND_CORES
from ladder.techniques.keys import engine_named
from ladder.tuning.problem import problem_of

LLAMA = bundled_workload("llama-2-7b")
TWO = machine_with(2)


@pytest.mark.parametrize(
    ("cores", "ranks", "shares"),
    [
        (range(8), 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([4, 5, 7, 8, 9], 2, [[4, 5], [7, 8]]),
        ([3], 2, [[3], [3]]),
    ],
    ids=["a half each", "none has one more", "too few are shared"],
)
def test_each_rank_gets_as_many_neighbouring_cores(cores: list[int], ranks: int, shares: list[list[int]]) -> None:
    assert BIND_CORES.cores_of_ranks(cores, ranks) == shares


def test_two_threads_of_a_core_go_to_one_rank_and_each_rank_stays_on_its_socket(tmp_path: Path) -> None:
    for cpu in range(16):  # two sockets of four cores; the second threads are counted after all first ones
        socket = tmp_path / f"cpu{cpu}" / "topology"
        socket.mkdir(parents=True)
        (socket / "physical_package_id").write_text(f"{cpu % 8 // 4}\n")
        (socket / "core_id").write_text(f"{cpu % 4}\n")
        (tmp_path / f"cpu{cpu}" / f"node{cpu % 8 // 4}").mkdir()
    of_two = BIND_CORES.cores_of_ranks(by_place(range(16), tmp_path), 2)
    assert of_two == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    assert BIND_CORES.cores_of_ranks(by_place(range(16), tmp_path), 8)[1] == [1, 9]
    assert by_place([3, 1, 2], tmp_path / "nothing") == [1, 2, 3]


def test_ranks_are_bound_where_something_is_offloaded_or_nothing_runs_on_a_gpu() -> None:
    suited = {rung.name for rung in RUNGS_BY_NAME.values() if BIND_CORES.suits(problem_of(LLAMA, TWO), rung)}
    assert suited == {rung.name for rung in RUNGS_BY_NAME.values() if rung.devices}
    on_cpu = problem_of(LLAMA, replace(TWO, device="cpu", gpus=()))
    assert all(BIND_CORES.suits(on_cpu, rung) for rung in RUNGS_BY_NAME.values())
    assert not BIND_CORES.suits(replace(on_cpu, num_cores=1), RUNGS_BY_NAME["zero0"])


def test_the_launch_script_binds_the_ranks_that_it_starts_through_itself(tmp_path: Path) -> None:
    usual = answer("zero2+opt-cpu")
    paths = OutputPaths.beside(tmp_path / "best_config.json")
    bound = replace(usual, candidate=replace(usual.candidate, engine=engine_named("zero2+opt-cpu+bind-cores")))
    script = launch_script(bound, paths)
    assert "accelerate launch --no_python " in script
    assert 'bash "$0" --rank "$@" ${trainer' in script
    (line,) = [line for line in script.splitlines() if line.lstrip().startswith("cores=(")]
    lists = line.strip().removeprefix("cores=(").removesuffix(")").split()
    assert len(lists) == usual.world_size
    assert {int(core) for each in lists for core in each.split(",")} <= os.sched_getaffinity(0)
    assert "taskset" not in launch_script(usual, paths)
