"""An NVMe path that is missing, read-only, full, slow or without O_DIRECT is found before any trial; nothing stays."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from faults.mounts import fill, make_read_only, mounted
from helpers import bundled_workload

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.errors import EnvironmentFaultError, LadderError, UsageError
from ladder.launch.sweep import Sweep
from ladder.machine.described import Machine
from ladder.machine.nvme import check_nvme_path, needed_bytes, nvme_shortage
from ladder.tuning.obstacles import with_obstacles
from ladder.units import GIB, MIB

OPTIMIZER, BOTH = RUNGS_BY_NAME["zero3+opt-nvme"], RUNGS_BY_NAME["zero3+param-nvme+opt-nvme"]
WORKLOAD = bundled_workload()


def test_a_path_that_takes_direct_writes_is_left_as_it_was_and_its_speed_known(tmp_path: Path) -> None:
    with disk_image(tmp_path, 96) as drive:
        assert check_nvme_path(drive) > MIB
        assert [path.name for path in drive.iterdir()] == ["lost+found"]


def refusal(path: Path, kind: type[LadderError]) -> str:
    with pytest.raises(kind) as caught:
        check_nvme_path(path)
    sentence = str(caught.value)
    assert sentence.isprintable()
    return sentence


def test_a_path_that_is_no_folder_has_to_be_made_first(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "missing", tmp_path / "two\nlines"):
        assert "is not a folder; create it" in refusal(path, UsageError)


def test_a_file_system_without_direct_io_is_refused(tmp_path: Path) -> None:
    with mounted(tmp_path / "ram", "ramfs") as drive:
        try:
            os.close(os.open(drive / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
        except OSError:
            pass
        else:
            pytest.skip("this kernel's ramfs has O_DIRECT")
        (drive / "probe").unlink(missing_ok=True)
        assert "with O_DIRECT (Invalid argument); choose" in refusal(drive, UsageError)
        assert list(drive.iterdir()) == []


def test_a_read_only_drive_is_refused(tmp_path: Path) -> None:
    with mounted(tmp_path / "drive", "tmpfs", "size=1m") as drive:
        make_read_only(drive)
        assert "cannot be written (Read-only file system)" in refusal(drive, EnvironmentFaultError)


def test_a_drive_that_is_full_to_the_last_block_is_refused(tmp_path: Path) -> None:
    with disk_image(tmp_path, 16) as drive:
        fill(drive)
        with pytest.raises(OSError, match="No space left"):
            (drive / "probe").write_bytes(bytes(8192))
        (drive / "probe").unlink()
        assert "is full; free some space" in refusal(drive, EnvironmentFaultError)


def test_a_drive_with_too_little_room_makes_the_rungs_unsupported_with_the_figures(tmp_path: Path) -> None:
    with disk_image(tmp_path, 64) as drive:
        speed = check_nvme_path(drive)
        usage = os.statvfs(drive)
        assert usage.f_bavail * usage.f_frsize < needed_bytes(OPTIMIZER, WORKLOAD)
        machine = replace(a_machine(), nvme_path=drive, nvme_write_speed=speed)
        found = with_obstacles(machine, [OPTIMIZER, BOTH], WORKLOAD)
        # 12 and 14 bytes for each of 20.5 million parameters.
        for rung, figure in ((OPTIMIZER, "0.23 GiB"), (BOTH, "0.27 GiB")):
            assert re.fullmatch(
                rf"it needs {figure} on --nvme-path, where \d+ MiB are free", found.unsupported[rung.name]
            )
        assert list(drive.glob(".ladder*")) == []


def test_a_drive_that_is_really_slow_makes_the_rungs_unsupported_with_the_figures(tmp_path: Path) -> None:
    with disk_image(tmp_path, 512) as drive, throttled(drive, MIB) as cgroup:
        measured = float(in_cgroup(cgroup, f"print(check_nvme_path(Path({str(drive)!r})))"))
        assert measured < 3 * MIB
        reason = nvme_shortage(OPTIMIZER, WORKLOAD, drive, measured)
        assert reason is not None
        assert re.fullmatch(
            r"a step moves up to 0\.57 GiB, which takes \d+ minutes at the \d\.\d MiB/s of --nvme-path, "
            r"and a trial waits for 4 minutes",
            reason,
        )
        assert nvme_shortage(OPTIMIZER, WORKLOAD, drive, 500 * MIB) is None


# Swap files


def write_swap_until_killed(folder: Path) -> None:
    """A process that fills a swap file and is killed with SIGKILL in the middle of it."""
    code = (
        "import sys, pathlib\n"
        "folder = pathlib.Path(sys.argv[1]) / 'zero_stage_3' / 'optimizer'; folder.mkdir(parents=True)\n"
        "with (folder / 'rank0.swp').open('wb', buffering=0) as file:\n"
        "    while True: file.write(bytes(4096)); print('x', flush=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(2)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert next(folder.rglob("*.swp")).stat().st_size > 0


def test_swap_files_of_a_killed_tune_are_removed_at_the_next_start_from_every_drive_and_nobody_elses(
    tmp_path: Path,
) -> None:
    run, drives = tmp_path / "run", [tmp_path / name for name in ('nvme "drive"\nof ours', "another")]
    for folder in (run, *drives):
        folder.mkdir()
    for drive in drives:
        Sweep("ladder-0123456789abcdef", run).remember(drive)
        write_swap_until_killed(drive / "ladder-0123456789abcdef-0001")
        (drive / "ladder-fedcba9876543210-0001").mkdir()
        (drive / "data.bin").touch()
    Sweep("ladder-0123456789abcdef", run)()
    for drive in drives:
        assert sorted(path.name for path in drive.iterdir()) == ["data.bin", "ladder-fedcba9876543210-0001"]


def test_a_link_with_our_marker_does_not_lead_the_sweep_elsewhere(tmp_path: Path) -> None:
    run, drive, precious = tmp_path / "run", tmp_path / "drive", tmp_path / "precious"
    for folder in (run, drive, precious):
        folder.mkdir()
    (precious / "thesis.tex").touch()
    (drive / "ladder-0123456789abcdef-0001").symlink_to(precious)
    sweep = Sweep("ladder-0123456789abcdef", run)
    sweep.remember(drive)
    sweep()
    assert (precious / "thesis.tex").exists()


def a_machine() -> Machine:
    return Machine(device="cuda", world_size=2, memory_limit=GIB, host_memory=GIB, num_cores=2)


@contextmanager
def disk_image(folder: Path, mebibytes: int) -> Iterator[Path]:
    """A small ext4 file system in a file of `folder`, with O_DIRECT and an end."""
    image = folder / "drive.img"
    with image.open("wb") as file:
        file.truncate(mebibytes << 20)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, capture_output=True, timeout=30)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot make a file system here: {error}")
    with mounted(folder / "drive", "ext4", "loop", str(image)) as drive:
        yield drive


@contextmanager
def throttled(drive: Path, bytes_per_second: int) -> Iterator[Path]:
    """A control group whose writes to the device of `drive` the kernel slows down."""
    root, device = Path("/sys/fs/cgroup/blkio"), drive.stat().st_dev
    group = root / f"ladder-test-{os.getpid()}"
    try:
        group.mkdir()
        limit = group / "blkio.throttle.write_bps_device"
        limit.write_text(f"{os.major(device)}:{os.minor(device)} {bytes_per_second}")
    except OSError as error:
        pytest.skip(f"cannot slow a device down here: {error}")
    try:
        yield group
    finally:
        for _ in range(50):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def in_cgroup(group: Path, statement: str) -> str:
    code = (
        f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        f"from pathlib import Path; from ladder.machine.nvme import check_nvme_path\n{statement}"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    return done.stdout
