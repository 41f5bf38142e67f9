"""Two tunes never share a GPU, nobody's process is disturbed, and a lease ends with the process that holds it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest
from faults.fake_nvml import FakeGpus
from helpers import ladder

from ladder.machine.lease import BusyGpusError, InterruptedWaitError, Leases
from ladder.units import GIB

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")

CHOOSE = """
def note(text): print(text, flush=True)
leases = Leases(wait={wait}, note=note)
chosen = leases.choose(visible_gpus(), {count}, None)
print(*(gpu.uuid for gpu in chosen), flush=True)
"""
# A tune as far as leases go: takes the GPUs, says so, and holds on.
HOLD = """
import sys, time
from pathlib import Path
from ladder.machine.gpus import visible_gpus
from ladder.machine.lease import Leases
leases = Leases()
print(*(gpu.uuid for gpu in leases.choose(visible_gpus(), {count}, None)), flush=True)
leases.name_run(Path({folder!r}))
print("named", flush=True)
time.sleep(60)
"""


@contextmanager
def holding(
    gpus: FakeGpus, count: int = 2, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[subprocess.Popen[str]]:
    """Another tune that holds the first `count` GPUs."""
    process = gpus.start(HOLD.format(count=count, folder=str(gpus.folder / "its run")), **environment)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().split() == [f"GPU-fake-{index}" for index in range(count)]
        assert process.stdout.readline() == "named\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def choose(count: int = 2, *, wait: bool = False) -> str:
    return CHOOSE.format(count=count, wait=wait)


def waiting_tune(gpus: FakeGpus) -> subprocess.Popen[str]:
    """Another one that wants both GPUs, and waits for them."""
    imports = "from ladder.machine.gpus import visible_gpus\nfrom ladder.machine.lease import Leases\n"
    return gpus.start(imports + choose(wait=True))


def test_a_second_tune_names_the_holder_and_its_run_folder_and_leaves_it_alone(gpus: FakeGpus, tmp_path: Path) -> None:
    with holding(gpus) as first:
        process = gpus.tune("tiny-llama", folder=tmp_path)
        output, errors = process.communicate(timeout=60)
        assert (process.returncode, output) == (4, "")
        last = errors.strip().splitlines()[-1]
        assert f"GPU GPU-fake-0 (Fake GPU) is held by another tune (pid {first.pid}, run folder" in last
        assert repr(str(tmp_path / "its run")) in last
        assert "--wait" in last
        assert not (tmp_path / "ladder-runs").exists()
        assert first.poll() is None


def test_a_second_tune_takes_other_gpus_where_it_may_choose(gpus: FakeGpus) -> None:
    with holding(gpus, 1):
        assert gpus.run(choose(1)) == "GPU-fake-1"
        assert "is held by another tune" in gpus.run(choose(2))
    assert gpus.run(choose(2)) == "GPU-fake-0 GPU-fake-1"


def test_a_child_of_the_holder_does_not_inherit_its_leases(gpus: FakeGpus) -> None:
    child = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(30)']); "
    code = HOLD.format(count=2, folder="x").replace("time.sleep(60)", f"{child}print(p.pid, flush=True)")
    first = gpus.start(code)
    assert first.stdout is not None
    lines = [first.stdout.readline() for _ in range(3)]
    first.wait(10)
    orphan = psutil.Process(int(lines[2]))
    try:
        assert orphan.is_running()
        assert gpus.run(choose()) == "GPU-fake-0 GPU-fake-1"
    finally:
        orphan.kill()
        first.stdout.close()


def test_with_wait_it_waits_says_for_whom_and_goes_on_when_the_first_one_ends(gpus: FakeGpus) -> None:
    with holding(gpus) as first:
        second = waiting_tune(gpus)
        assert second.stdout is not None
        assert re.fullmatch(
            rf"Waiting: GPU GPU-fake-0 \(Fake GPU\) is held by another tune \(pid {first.pid}, .*\)\.\n",
            second.stdout.readline(),
        )
        time.sleep(1.2)
        assert second.poll() is None
        first.kill()
        output, errors = second.communicate(timeout=20)
        assert (second.returncode, output) == (0, "GPU-fake-0 GPU-fake-1\n"), errors


@pytest.mark.parametrize(("interruption", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_waiting_ends_at_ctrl_c_with_the_shells_status(
    gpus: FakeGpus, tmp_path: Path, interruption: signal.Signals, status: int
) -> None:
    with holding(gpus):
        process = gpus.tune("tiny-llama", "--wait", folder=tmp_path)
        assert process.stderr is not None
        assert process.stderr.readline().startswith("Waiting: ")
        process.send_signal(interruption)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == status
        assert "Traceback" not in errors
        assert not (tmp_path / "ladder-runs").exists()


# Several nodes: here they are this machine, but each has leases of its own

TUNE_ON_NODES = """
import sys, time
from ladder.errors import LadderError
from ladder.launch.nodes.cluster import Cluster, Wanted
from ladder.launch.nodes.connection import Node
def node(name):
    return Node(name=name, command=lambda program: ["env", "LADDER_LEASES={folder}/leases-" + name, *program])
waited = []
cluster = Cluster(
    [node(name) for name in {names}],
    Wanted(gpus=2, gpu_memory=None, host_memory=None, nvme_path=None, wait={wait}),
    lambda: False,
    lambda text: print(text, flush=True),
    waited.append,
)
try:
    machine = cluster.machine()
    print(machine.world_size, "ranks, waited:", sum(waited) > 0, flush=True)
    time.sleep({seconds})
except LadderError as error:
    print(error.exit_code, error)
finally:
    cluster.close()
"""


def tune_on_nodes(gpus: FakeGpus, *names: str, wait: bool = True, seconds: float = 0) -> subprocess.Popen[str]:
    """A tune over both nodes as far as leases go, in this order of the nodes; it holds them for so many seconds."""
    names = names or ("node1", "node2")
    return gpus.start(TUNE_ON_NODES.format(folder=gpus.folder, names=names, wait=wait, seconds=seconds))


def leases_of(gpus: FakeGpus, name: str) -> dict[str, str]:
    return {"LADDER_LEASES": f"{gpus.folder}/leases-{name}"}


def test_gpus_of_another_node_that_are_held_are_told_with_the_node(gpus: FakeGpus) -> None:
    with holding(gpus, 2, leases_of(gpus, "node2")) as first:
        output, errors = tune_on_nodes(gpus, wait=False).communicate(timeout=60)
    assert output.startswith(f"4 Node node2: GPU GPU-fake-0 (Fake GPU) is held by another tune (pid {first.pid}"), (
        errors
    )
    assert "wait for it with --wait" in output


def test_with_wait_a_tune_over_nodes_waits_and_leaves_the_gpus_of_the_free_node_to_others(gpus: FakeGpus) -> None:
    with holding(gpus, 2, leases_of(gpus, "node2")) as first:
        waiting = tune_on_nodes(gpus)
        assert waiting.stdout is not None
        assert waiting.stdout.readline().startswith("Waiting: Node node2: GPU GPU-fake-0 (Fake GPU) is held by")
        between = gpus.run(choose(wait=True), **leases_of(gpus, "node1"))
        assert between.splitlines()[-1] == "GPU-fake-0 GPU-fake-1"
        assert waiting.poll() is None
        first.kill()
        output, errors = waiting.communicate(timeout=30)
    assert output.splitlines()[-1] == "4 ranks, waited: True", errors


def test_tunes_that_want_the_same_nodes_in_another_order_get_them_one_after_the_other(gpus: FakeGpus) -> None:
    tunes = [tune_on_nodes(gpus, *names, seconds=1) for names in (("node1", "node2"), ("node2", "node1"))]
    for tune in tunes:
        output, errors = tune.communicate(timeout=60)
        assert output.splitlines()[-1].startswith("4 ranks"), errors


# Somebody else's process on the GPU

STRANGER = """
import signal, sys, time
for number in range(1, 32):
    if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
        signal.signal(number, lambda got, frame: sys.exit(f"signal {got}"))
print("ready", flush=True)
time.sleep(60)
"""


@contextmanager
def stranger(gpus: FakeGpus, **settings: float) -> Iterator[subprocess.Popen[bytes]]:
    """A process of somebody's that NVML shows on GPU 0, and that reports every signal it gets."""
    process = subprocess.Popen([sys.executable, "-c", STRANGER], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    gpus.set(pid0=process.pid, used0=GIB, **settings)
    try:
        yield process
        assert process.poll() is None, "the stranger was disturbed"
    finally:
        process.kill()
        process.communicate()


def test_a_gpu_that_a_stranger_uses_is_refused_with_its_pid_at_once(gpus: FakeGpus) -> None:
    with stranger(gpus) as process:
        began = time.monotonic()
        said = gpus.run(choose())
        assert said.startswith(f"BusyGpusError 4: GPU GPU-fake-0 (Fake GPU) is used by pid {process.pid} (python")
        assert "holds 1.00 GiB of 80.00 GiB" in said
        assert time.monotonic() - began < 10


def test_with_wait_the_stranger_is_waited_for_and_never_signalled(gpus: FakeGpus) -> None:
    with stranger(gpus) as process:
        waiting = waiting_tune(gpus)
        assert waiting.stdout is not None
        assert f"is used by pid {process.pid}" in waiting.stdout.readline()
        # Whoever waits holds nothing, not even the lease of the GPU that is free.
        assert gpus.run(choose(1)) == "GPU-fake-1"
        gpus.set(pid0=0, used0=0)
        output, errors = waiting.communicate(timeout=20)
        assert output == "GPU-fake-0 GPU-fake-1\n", errors


# The folder of leases


def test_every_user_may_take_a_lease_and_none_can_remove_anothers(gpus: FakeGpus) -> None:
    with holding(gpus) as first:
        folder = gpus.folder / "leases"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
        assert sorted(path.name for path in folder.iterdir()) == ["GPU-fake-0", "GPU-fake-1"]
        for path in folder.iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o666
            assert json.loads(path.read_text()) == {"pid": first.pid, "run_folder": str(gpus.folder / "its run")}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_the_lease_of_one_user_holds_against_another(gpus: FakeGpus) -> None:
    take = (
        "import fcntl, os, sys; os.setuid(12345)\n"
        "lease = os.open(f'/proc/self/fd/{sys.argv[1]}/GPU-fake-0', os.O_RDWR)\n"
        "fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB); print('taken')"
    )
    with holding(gpus) as first:
        folder = os.open(gpus.folder / "leases", os.O_RDONLY)  # this test's own folder is closed to other users
        command = [sys.executable, "-S", "-c", take, str(folder)]
        for holder_lives in (True, False):
            if not holder_lives:
                first.kill()
                first.wait(10)
            done = subprocess.run(command, check=False, pass_fds=(folder,), capture_output=True, text=True, timeout=30)
            assert ("BlockingIOError" in done.stderr) == holder_lives, done.stderr
            assert ("taken" in done.stdout) == (not holder_lives)
        os.close(folder)


PLANTED: dict[str, Callable[[Path, Path], None]] = {
    "a link": lambda path, victim: path.symlink_to(victim),
    "a hard link": lambda path, victim: path.hardlink_to(victim),
    "a pipe": lambda path, victim: os.mkfifo(path),
}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_what_somebody_planted_in_place_of_a_lease_is_refused_and_not_written_to(
    gpus: FakeGpus, tmp_path: Path, plant: Callable[[Path, Path], None]
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "leases").mkdir()
    plant(tmp_path / "leases" / "GPU-fake-0", victim)
    said = gpus.run(choose())
    assert said.startswith("EnvironmentFaultError 4: GPU GPU-fake-0 (Fake GPU) cannot be leased")
    assert "LADDER_LEASES" in said
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("text", ["", "[]", '{"pid": "x"}', "\x1b[31m", '{"pid": 1, "run_folder": "\\u001b[31m"}'])
def test_nonsense_in_a_lease_is_shown_as_text_at_most(gpus: FakeGpus, text: str) -> None:
    with holding(gpus, 1):
        (gpus.folder / "leases" / "GPU-fake-0").write_text(text)
        said = gpus.run(choose())
        assert "is held by another tune (pid " in said
        assert said.isprintable()


def test_two_tunes_on_one_cpu_know_of_each_other_and_on_different_cores_do_not_meet(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    with Leases(folder=tmp_path) as first, Leases(folder=tmp_path) as second:
        first.hold_cores()
        first.name_run(tmp_path / "its run")
        with pytest.raises(BusyGpusError) as refused:
            second.hold_cores()
        assert str(refused.value) == (
            f"The CPU is held by another tune (pid {os.getpid()}, run folder '{tmp_path / 'its run'}'); wait for it "
            "with --wait, or give it other cores (taskset)."
        )
        told: list[str] = []

        def ends(text: str) -> None:
            told.append(text)
            first.close()

        with Leases(wait=True, note=ends, folder=tmp_path) as patient:
            patient.hold_cores()
        assert told == [f"Waiting: {str(refused.value).partition(';')[0]}."]
        first.hold_cores()
        with pytest.raises(InterruptedWaitError):
            Leases(wait=True, cancelled=lambda: True, folder=tmp_path).hold_cores()
        if len(cores) > 1:
            try:
                os.sched_setaffinity(0, {min(cores)})
                second.hold_cores()
            finally:
                os.sched_setaffinity(0, cores)


def test_where_no_lease_can_be_kept_a_cpu_is_used_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    with Leases(note=said.append, folder=tmp_path / "file") as leases:
        leases.hold_cores()
    (warning,) = said
    assert warning.startswith("Warning: another tune here would not know of this one. The CPU cannot be leased")


def test_of_two_tunes_on_one_cpu_the_second_is_refused_before_any_trial(tmp_path: Path) -> None:
    with Leases(folder=Path(os.environ["LADDER_LEASES"])) as held:
        held.hold_cores()
        done = ladder("tune", "tiny-llama", "--gpus", "0", folder=tmp_path)
    assert done.status == 4
    assert "ladder: The CPU is held by another tune (pid " in done.errors
    assert not (tmp_path / "ladder-runs").exists()
