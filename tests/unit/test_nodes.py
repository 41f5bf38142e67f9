"""Several nodes: which are found, what of them counts, and how one trial is made of what each saw."""

from __future__ import annotations

import errno
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny_trial

from ladder.errors import EnvironmentFaultError, UsageError
from ladder.events.protocol import Event, PhaseEvent
from ladder.events.trial_run import DeviceUse, Ending, TrialRun
from ladder.launch.nodes import network
from ladder.launch.nodes.cluster import machine_of, require_alike
from ladder.launch.nodes.hostfile import hostfile_nodes
from ladder.launch.nodes.merged import merged
from ladder.launch.nodes.network import answering, own_addresses, reachable, served
from ladder.launch.nodes.slurm import is_in_allocation, nodes_among
from ladder.launch.nodes.wire import from_wire, to_wire
from ladder.tuning.venues.nodes import gpus_of_a_node
from ladder.units import GIB

JOB = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "node[1-3]", "SLURM_JOB_CPUS_PER_NODE": "16(x2),8"}
NAMES = ["node1", "node2", "node3"]
SOFTWARE = {"python": "3.11.7", "torch": "2.13.0"}


def described(**changes: Any) -> dict[str, Any]:
    of_machine = {
        "device": "cuda",
        "gpus": [{"uuid": f"GPU-{n}", "name": "NVIDIA H200", "total_bytes": 140 * GIB, "fault": ""} for n in range(4)],
        "memory_limit": 140 * GIB,
        "host_memory": 500 * GIB,
        "num_cores": 64,
        "nvme_write_speed": 3e9,
        "allocator": {},
    }
    facts = {"driver": "580", "cpu": "x", "torch": "2.13.0"}
    return {"machine": {**of_machine, **changes}, "software": SOFTWARE, "facts": facts, "addresses": ["10.0.0.1"]}


def part(tmp_path: Path, **what: Any) -> TrialRun:
    return TrialRun(spec=tiny_trial(tmp_path, 1), events=[[], []], **what)


def test_the_first_nodes_of_a_job_start_programs_as_steps_with_all_their_cores() -> None:
    nodes = nodes_among(NAMES, 3, JOB)
    assert [node.name for node in nodes] == ["node1", "node2", "node3"]
    command = nodes[2].command(["python", "-V"])
    assert command[0] == "srun"
    assert {"--jobid=17", "--overlap", "--kill-on-bad-exit=1", "--nodelist=node3", "--cpus-per-task=8"} <= set(command)
    assert command[-2:] == ["python", "-V"]
    (node, *_) = nodes_among(NAMES, 1, {**JOB, "SLURM_JOB_CPUS_PER_NODE": "many"})
    assert not any("--cpus" in word for word in node.command(["python"])), "what is described otherwise is Slurm's"
    assert (is_in_allocation(JOB), is_in_allocation({})) == (True, False)


def test_a_job_with_fewer_nodes_than_asked_for_is_refused() -> None:
    with pytest.raises(EnvironmentFaultError, match=r"--nodes 4 asks for more than the 3 of Slurm job 17"):
        nodes_among(NAMES, 4, JOB)


def test_a_hostfile_gives_nodes_reached_by_ssh_and_their_slots(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# ours\nworker-1 slots=4\n\nme@10.0.0.2 slots=4 # the other\n")
    nodes, slots = hostfile_nodes(file, None)
    assert ([node.name for node in nodes], slots) == (["worker-1", "me@10.0.0.2"], 4)
    command = nodes[1].command(["python", "a b"])
    assert command[0] == "ssh"
    assert "BatchMode=yes" in command
    assert command[-2] == "me@10.0.0.2"
    assert command[-1].endswith("exec python 'a b'")
    assert [node.name for node in hostfile_nodes(file, 1)[0]] == ["worker-1"]


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("a slots=1\na slots=1\n", EnvironmentFaultError, "names a twice"),
        ("a slots=1\nb slots=2\n", EnvironmentFaultError, r"different numbers of slots \(a 1, b 2\)"),
        ("a slots=1\n", EnvironmentFaultError, "more than the 1 hosts"),
        ("a\n", UsageError, "line 1: a is not"),
        ("a slots=0\n", UsageError, "line 1"),
        ("-oProxyCommand=x slots=1\n", UsageError, "line 1"),
        ("# nothing\n", UsageError, "names no host"),
        ("", UsageError, "cannot be read"),
    ],
)
def test_a_hostfile_that_cannot_be_used_is_refused(
    text: str, error: type[Exception], said: str, tmp_path: Path
) -> None:
    if text:
        (tmp_path / "hosts").write_text(text)
    with pytest.raises(error, match=said):
        hostfile_nodes(tmp_path / "hosts", 2)


def test_gpus_are_divided_evenly_over_nodes_or_refused() -> None:
    assert gpus_of_a_node(16, 2) == 8
    with pytest.raises(UsageError, match=r"--gpus 15 cannot be divided evenly over 2 nodes.* use --gpus 14"):
        gpus_of_a_node(15, 2)
    with pytest.raises(UsageError, match=r"use --gpus 4\."):
        gpus_of_a_node(1, 4)


def test_the_smallest_node_decides_what_each_rank_has() -> None:
    machine = machine_of([described(), described(memory_limit=80 * GIB, num_cores=32)], ["a", "b"], Path("/local"))
    assert (machine.world_size, machine.num_nodes, machine.memory_limit) == (8, 2, 80 * GIB)
    assert (machine.num_cores, machine.host_memory, machine.nvme_write_speed) == (64, 1000 * GIB, 3e9)
    assert len(machine.gpus) == 4
    cpu = described(device="cpu", gpus=[], nvme_write_speed=None)
    machine = machine_of([cpu, cpu, cpu], ["a", "b", "c"], None)
    assert (machine.device, machine.world_size, machine.nvme_write_speed) == ("cpu", 3, None)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({**described(), "software": {**SOFTWARE, "torch": "2.12.0"}}, "Node b has torch 2.12.0 and node a has 2.13.0"),
        (described(gpus=[]), "Node b has no GPU and node a has 4 × NVIDIA H200"),
    ],
)
def test_a_node_unlike_the_first_is_named(other: dict[str, Any], said: str) -> None:
    with pytest.raises(EnvironmentFaultError, match=said):
        require_alike([described(), other], ["a", "b"])
    require_alike([described(), described(memory_limit=1)], ["a", "b"])


def test_a_part_survives_its_way_to_the_controller_on_the_controllers_clock(tmp_path: Path) -> None:
    use = DeviceUse(utilisation=0.5, watts=300.0, peak_bytes=7)
    stop = Ending(kind="hang", sentence="it hangs", rank=1)
    sent = part(tmp_path, exits={1: -9}, killed=frozenset({1}), stop=stop, oom_kills=2, started=110.0)
    sent.device_use["a"] = use
    back = from_wire(sent.spec, to_wire(sent), ahead=100.0)
    assert (back.exits, back.killed, back.stop, back.oom_kills) == ({1: -9}, frozenset({1}), stop, 2)
    assert (back.started, back.device_use) == (10.0, {"a": use})


def test_parts_are_joined_and_one_that_was_told_to_end_says_nothing(tmp_path: Path) -> None:
    told = Ending(kind="cancelled", sentence="the tune was interrupted")
    hang = Ending(kind="hang", sentence="rank 1 was silent", rank=1)
    first = part(tmp_path, exits={0: 0}, stop=told, started=1.0, oom_kills=1)
    second = part(tmp_path, exits={1: -9}, killed=frozenset({1}), stop=hang, started=2.0, oom_kills=1)
    whole = merged(first.spec, [first, second], ["a", "b"], [[], []], None)
    assert whole.stop == hang
    assert (whole.exits, whole.killed, whole.started, whole.oom_kills) == ({0: 0, 1: -9}, frozenset({1}), 2.0, 2)
    assert merged(first.spec, [first, second], ["a", "b"], [[], []], told).stop == told


def test_of_ranks_that_hang_on_several_nodes_the_stopped_one_is_named_or_the_one_that_reported_least(
    tmp_path: Path,
) -> None:
    waits, stuck = (Ending(kind="hang", sentence=f"rank {rank} was silent", rank=rank) for rank in (0, 1))
    begun: list[Event] = [PhaseEvent(t=1.0, phase="model")]

    def named(first: Ending, second: Ending, events: list[list[Event]]) -> Ending | None:
        parts = [part(tmp_path, stop=stop) for stop in (first, second)]
        return merged(parts[0].spec, parts, ["a", "b"], events, None).stop

    assert named(waits, stuck, [begun, []]) == stuck
    assert named(waits, stopped := replace(stuck, is_stopped=True), [begun, begun * 2]) == stopped
    broken = Ending(kind="environment", sentence="the GPU is lost")
    assert named(waits, broken, [[], []]) == replace(broken, sentence="on node b: the GPU is lost")


def test_power_of_all_nodes_adds_up_and_what_one_does_not_know_is_unknown(tmp_path: Path) -> None:
    def using(watts: float | None, peak: int) -> TrialRun:
        use = DeviceUse(utilisation=watts and 0.5, watts=watts, peak_bytes=peak)
        return part(tmp_path, device_use={"a": use})

    def together(*parts: TrialRun) -> DeviceUse:
        return merged(parts[0].spec, parts, ["x", "y"], [[], []], None).device_use["a"]

    assert together(using(100.0, 5), using(200.0, 7)) == DeviceUse(utilisation=0.5, watts=300.0, peak_bytes=7)
    assert together(using(100.0, 5), using(None, 7)).watts is None
    assert merged(tiny_trial(tmp_path, 1), [using(1.0, 1), part(tmp_path)], ["x", "y"], [], None).device_use == {}


def test_the_node_that_serves_a_token_is_told_from_others() -> None:
    gone = threading.Event()
    port = served("secret", gone)
    try:
        assert reachable(["127.0.0.1", "127.0.0.2"], port, "secret") == ["127.0.0.1", "127.0.0.2"]
        assert reachable(["127.0.0.1"], port, "of another node") == []
    finally:
        gone.set()
    assert reachable(["127.0.0.1"], 1, "secret") == []


def test_a_host_answers_also_where_nothing_listens_and_a_host_that_is_not_there_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "own_addresses", list)  # as if this host were another one
    monkeypatch.setattr(network, "_is_loopback", lambda address: False)
    nobody = "255.255.255.255"  # cannot be connected to
    assert answering([nobody]) is None
    assert answering([nobody, "127.0.0.1"]) == "127.0.0.1"
    monkeypatch.undo()
    assert answering(own_addresses()) is None, "an address that this host has too says nothing of another one"


def test_a_host_whose_kernel_has_no_ipv6_asks_at_the_other_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "own_addresses", list)
    monkeypatch.setattr(network, "_is_loopback", lambda address: False)

    class Ipv4Alone(socket.socket):
        def __init__(self, family: int = -1, *kind: int, **more: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *kind, **more)

    monkeypatch.setattr(socket, "socket", Ipv4Alone)
    assert answering(["2001:db8::1", "127.0.0.1"]) == "127.0.0.1"
    assert answering(["2001:db8::1"]) is None
