"""`ladder doctor --measure`, for real, on two CPU ranks; what it keeps is what the next tune starts from."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from helpers import is_alive, wait_until
from helpers.searches import BILLION

from ladder.cli.main import main
from ladder.launch.machine_measuring import measure_points
from ladder.launch.modules import module_command, module_environment
from ladder.launch.nodes.cluster import Cluster, Wanted
from ladder.launch.nodes.connection import Node
from ladder.launch.rank_environment import rank_environment, without_gpus
from ladder.machine.described import Machine
from ladder.machine.known_machine import facts_of, file_of, read_known
from ladder.machine.machine import detect_machine
from ladder.machine.rates import rates_of
from ladder.tuning.known import with_known

WANTED = Wanted(gpus=0, gpu_memory=None, host_memory=None, nvme_path=None)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LADDER_CACHE", str(tmp_path / "cache"))


def two_cpu_ranks() -> Machine:
    return detect_machine(gpus=0, gpu_memory=None, host_memory=None, nvme_path=None)


def speeds_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    assert main(["doctor", "--gpus", "0", "--format", "json", *arguments]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    return next(check for check in checks if check["name"] == "speeds")


def test_doctor_measures_the_machine_shows_it_later_and_a_tune_starts_from_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = file_of(facts_of(two_cpu_ranks()))
    assert "not measured" in speeds_line(capsys)["sentence"]
    file.parent.mkdir(parents=True)
    file.write_text("{")  # a damaged file is a warning, and measuring mends it
    assert speeds_line(capsys)["status"] == "WARN"
    line = speeds_line(capsys, "--measure")
    assert ("matrix products" in line["sentence"], line["status"]) == (True, "OK")
    line = speeds_line(capsys)
    assert ("measured on" in line["sentence"], line["status"]) == (True, "OK")
    known, ignored = read_known(facts_of(two_cpu_ranks()))
    assert known is not None
    assert ignored == ""
    assert {"flops", "device_bytes", "launch_seconds", "link_bytes"} <= set(known.rates)
    assert 1e8 < known.rates["flops"] < 1e14
    assert 1e-5 < known.rates["launch_seconds"] < 1
    assert set(known.points) >= {"products", "copies", "launches", "all_reduce", "all_gather"}
    assert with_known(two_cpu_ranks(), BILLION, lambda _: None).rates == known.rates


def test_a_cache_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LADDER_CACHE", str(tmp_path / "file"))
    found = {"rates": {"launches": [{"seconds": 0.002}]}, "failed": {}}
    monkeypatch.setattr("ladder.tuning.known.measure_points", lambda *_: found)
    line = speeds_line(capsys, "--measure")
    assert (line["status"], "LADDER_CACHE" in line["fix"]) == ("WARN", True)


def test_one_rank_has_no_links() -> None:
    machine = Machine(device="cpu", world_size=1, memory_limit=1, host_memory=1, num_cores=1)
    found = measure_points(machine, rank_environment(machine))
    assert found["failed"] == {}
    assert "all_reduce" not in found["rates"]
    assert "products" in found["rates"]


def test_the_links_between_two_nodes_of_two_ranks_are_measured_beside_those_in_each() -> None:
    with closing(
        Cluster([Node(name=name, command=list) for name in ("node1", "node2")], WANTED, lambda: False)
    ) as both:
        machine = both.machine()
        found = both.measured(2, without_gpus(rank_environment(machine)))
    assert found["failed"] == {}
    for name in ("all_reduce", "all_gather"):
        for point in (*found["rates"][name], *found["rates"][f"between_nodes_{name}"]):
            assert point["seconds"] > 0
    rates = rates_of(found["rates"], 4, 2)
    assert {"flops", "link_bytes", "network_bytes"} <= set(rates)


def test_ranks_end_with_the_process_that_asked() -> None:
    environment = module_environment(rank_environment(two_cpu_ranks()))
    command = module_command("ladder.trial.measure_machine")
    program = (
        "import json, os, subprocess, sys, time\n"
        f"process = subprocess.Popen({command!r}, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)\n"
        "share = {'first': 0, 'count': 2, 'address': '127.0.0.1', 'port': 0}\n"
        "job = {'device': 'cpu', 'gpu_uuids': [], 'share': share, 'world': 2, 'parent': os.getpid()}\n"
        "process.stdin.write(json.dumps(job).encode() + b'\\n'); process.stdin.flush()\n"
        "print(process.pid, flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE) as asking:
        assert asking.stdout is not None
        measuring = psutil.Process(int(asking.stdout.readline()))
        wait_until(lambda: len(measuring.children()) == 2, 60)
        family = [measuring, *measuring.children()]
        asking.kill()
        wait_until(lambda: not any(is_alive(process) for process in family), 10)
