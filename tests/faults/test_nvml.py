"""What NVML may answer instead of figures, under the real nvidia-ml-py: no fault of a GPU is a configuration's."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faults.fake_nvml import FakeGpus

from ladder.units import GIB

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")

DETECT = """
machine = detect_machine(gpus={gpus}, gpu_memory=None, host_memory=None, nvme_path=None)
print(machine.device, *(gpu.uuid for gpu in machine.gpus))
"""
SAMPLE = """
gpus = Gpus(["GPU-fake-0", "GPU-fake-1"])
sampler = Sampler(gpus)
sampler.start()
began = time.clock_gettime(time.CLOCK_MONOTONIC)
time.sleep(0.8)
sampler.stop()
use = sampler.between(began, time.clock_gettime(time.CLOCK_MONOTONIC))
print(use.utilisation, use.watts and round(use.watts / 100), use.peak_bytes, sampler.fault)
"""


def detect(number: int | None = None) -> str:
    return DETECT.format(gpus=number)


def test_the_fake_is_what_the_real_library_reads(gpus: FakeGpus) -> None:
    assert gpus.run("print(pynvml.__file__.endswith('pynvml.py'), pynvml.nvmlInit())") == "True None"
    assert gpus.run(detect()) == "cuda GPU-fake-0 GPU-fake-1"
    assert gpus.run(SAMPLE) == "0.5 6 0 None"


def test_a_rank_reads_the_memory_in_use_without_the_package_as_with_it(gpus: FakeGpus) -> None:
    gpus.set(used1=5 << 30)
    own = "pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(1)).used, end=' ')"
    ranks = "from ladder.trial.used_memory import UsedMemory\nprint(UsedMemory('GPU-fake-1').read())"
    assert gpus.run(f"{own}\n{ranks}") == f"{5 << 30} {5 << 30}"
    gpus.set(lost1=1)
    failing = "try: print(UsedMemory('GPU-fake-1').read())\nexcept RuntimeError as error: print(error)"
    assert gpus.run(f"from ladder.trial.used_memory import UsedMemory\n{failing}").startswith("NVML's nvmlDevice")


def test_what_computed_on_a_gpu_before_the_trial_is_told_from_the_trial_itself(gpus: FakeGpus) -> None:
    sample = SAMPLE.replace("print(use", "print(round(use.others, 6), use")
    assert gpus.run(sample).startswith("0.0 ")
    gpus.set(pid1=4711, taken1=40)
    assert gpus.run(sample).startswith("0.4 ")
    began_later = sample.replace("sampler = ", "open(os.environ['FAKE_NVML'], 'a').write('pid1 4712\\n')\nsampler = ")
    assert gpus.run(f"import os\n{began_later}").startswith("0.0 ")
    gpus.set(pid1=4711, taken1=40, unsupported=1)
    assert gpus.run(sample).startswith("0.0 ")  # what runs there is not said either


# Lost GPUs


def test_a_gpu_lost_before_the_tune_is_the_environments_fault(gpus: FakeGpus) -> None:
    gpus.set(lost1=1)
    assert gpus.run(
        "pynvml.nvmlInit()\ntry: pynvml.nvmlDeviceGetHandleByIndex(1)\nexcept Exception as e: print(e)"
    ) == ("GPU is lost")
    said = gpus.run(detect())
    assert said.startswith("EnvironmentFaultError 4: GPU 1 cannot be used: GPU is lost; reset it or reboot, or choose")


def test_the_others_can_still_be_tuned_on(gpus: FakeGpus) -> None:
    gpus.set(lost0=1)
    assert gpus.run(detect(1)) == "cuda GPU-fake-1"
    assert gpus.run(detect(), CUDA_VISIBLE_DEVICES="1") == "cuda GPU-fake-1"
    assert "GPU 0 cannot be used: GPU is lost" in gpus.run(detect(2))


LOSE = """
import os
gpus = Gpus(["GPU-fake-0", "GPU-fake-1"])
sampler = Sampler(gpus)
sampler.start()
time.sleep(0.4)
open(os.environ["FAKE_NVML"], "a").write("lost1 1\\n")
time.sleep(0.6)
sampler.stop()
print(sampler.fault)
"""


def test_a_gpu_lost_during_a_trial_shows_in_the_sampler_and_ends_the_tune_at_the_next_question(gpus: FakeGpus) -> None:
    sentence = "GPU GPU-fake-1 no longer answers (GPU is lost); reset it or reboot"
    assert gpus.run(LOSE).startswith(sentence)
    gpus.set(lost1=0)
    for question in ("gpus.mark()", "print(gpus.wait_released(1.0))", "Gpus(['GPU-fake-1'])"):
        said = gpus.run(LOSE.replace("print(sampler.fault)", question))
        assert said.startswith(f"EnvironmentFaultError 4: {sentence}"), question
        gpus.set(lost1=0)


LOSE_IN_A_TRIAL = """
import os
from pathlib import Path
from helpers import tiny_trial
from ladder.launch import local
from ladder.launch.base import Deadlines

class Server:
    pid = os.getpid()
    def __init__(self, **options): pass
    def wait_ready(self, *arguments): return True
    def start(self, *arguments, **options): open(os.environ["FAKE_NVML"], "a").write("lost0 1\\n")
    def kill_ranks(self): pass
    def is_stopped(self, *arguments): return False
    def poll(self, seconds): return [
        {{"event": "exit", "rank": rank, "status": -6}} for rank in range(2)] + [{{"event": "empty"}}]
    def close(self): return []

local.TrialServer = Server
launcher = local.LocalLauncher(
    marker="m", job={{}}, environment={{}}, log=Path({folder!r}) / "log", gpu_uuids=("GPU-fake-0", "GPU-fake-1"))
run = launcher.run(tiny_trial(Path({folder!r}) / "0001", 1), Deadlines(), lambda rank, event: None)
print(run.exits, run.stop.kind, run.stop.sentence)
"""


def test_a_trial_whose_ranks_crash_with_their_gpu_is_the_environments_fault(gpus: FakeGpus, tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[1])
    said = gpus.run(LOSE_IN_A_TRIAL.format(folder=str(tmp_path)), PYTHONPATH=tests)
    assert said.startswith("{0: -6, 1: -6} environment GPU GPU-fake-0 no longer answers (GPU is lost)")


def test_an_error_that_passes_is_asked_again(gpus: FakeGpus) -> None:
    gpus.set(flaky=2)
    assert gpus.run("print(Gpus(['GPU-fake-0'])._before)") == "(0,)"
    gpus.set(flaky=9)
    said = gpus.run("Gpus(['GPU-fake-0'])")
    assert said.startswith("EnvironmentFaultError 4: GPU GPU-fake-0 no longer answers (Unknown Error)")


# Missing figures


def test_queries_that_are_not_supported_are_dashes(gpus: FakeGpus) -> None:
    gpus.set(unsupported=1)
    assert gpus.run(detect()) == "cuda GPU-fake-0 GPU-fake-1"
    assert gpus.run(SAMPLE) == "None None 0 None"


def test_a_driver_that_knows_fewer_functions_than_the_library_is_used_as_far_as_it_goes(
    gpus: FakeGpus, libraries: Callable[..., Path]
) -> None:
    gpus.environment["LD_LIBRARY_PATH"] = str(libraries("OLD"))
    lacking = "pynvml.nvmlInit()\ntry: pynvml.nvmlDeviceGetMigMode(None)\nexcept Exception as e: print(e.value)"
    assert gpus.run(lacking) == "13"
    assert gpus.run(detect()) == "cuda GPU-fake-0 GPU-fake-1"
    assert gpus.run(SAMPLE) == "0.5 None 0 None"
    gpus.set(used1=40 * GIB)
    assert "GPU-fake-1 (Fake GPU) already holds 40.00 GiB of 80.00 GiB" in gpus.run(detect())
    gpus.set(used1=0, pid0=1)
    assert "GPU-fake-0 (Fake GPU) is used by pid 1" in gpus.run(detect())


def test_a_driver_without_the_entry_point_has_to_be_updated(gpus: FakeGpus, libraries: Callable[..., Path]) -> None:
    gpus.environment["LD_LIBRARY_PATH"] = str(libraries("ANCIENT"))
    said = gpus.run(detect())
    assert said.startswith("EnvironmentFaultError 4: NVML cannot be used: the NVIDIA driver is too old")
    assert gpus.run(detect(0)) == "cpu"


def test_a_driver_that_was_updated_under_a_running_system_needs_a_reboot(gpus: FakeGpus) -> None:
    gpus.set(init=18)
    said = gpus.run(detect())
    assert said.startswith("EnvironmentFaultError 4: NVML cannot be used: the NVIDIA driver was updated")
    assert "reboot" in said
    assert gpus.run(detect(0)) == "cpu"


@pytest.mark.parametrize("error", [9, 12])
def test_without_a_driver_there_are_no_gpus(gpus: FakeGpus, error: int) -> None:
    gpus.set(init=error)
    assert gpus.run(detect()) == "cpu"


def test_gpus_split_by_mig_are_refused_and_left_out_where_there_is_a_choice(gpus: FakeGpus) -> None:
    gpus.set(mig0=1)
    said = gpus.run(detect())
    assert said.startswith("EnvironmentFaultError 4: GPU 0 is split by MIG and ladder tunes whole GPUs; turn that off")
    assert gpus.run(detect(1)) == "cuda GPU-fake-1"


# Memory that is still held

RELEASE = """
gpus = Gpus(["GPU-fake-0", "GPU-fake-1"])
import os
open(os.environ["FAKE_NVML"], "a").write(f"used0 {1 << 30}\\nrelease0 {time.monotonic() + 5}\\n")
assert not gpus.wait_released(0.2)
began = time.monotonic()
print(gpus.wait_released(30.0), round(time.monotonic() - began))
"""


def test_memory_that_takes_five_seconds_to_be_released_is_waited_for(gpus: FakeGpus) -> None:
    assert gpus.run(RELEASE) == "True 5"


def test_what_a_dead_process_held_is_waited_for_also_before_the_tune(gpus: FakeGpus) -> None:
    gpus.set(used0=30 * GIB, release0=time.monotonic() + 3)
    choose = "print([gpu.uuid for gpu in Leases().choose(visible_gpus(), 2, None)])"
    began = time.monotonic()
    assert gpus.run(choose) == "['GPU-fake-0', 'GPU-fake-1']"
    assert time.monotonic() - began > 2.5
