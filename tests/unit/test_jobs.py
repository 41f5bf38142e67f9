"""Slurm jobs that ladder submits: what they ask, the files between both sides, and how they end in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import bundled_workload, make_candidate, tiny_trial
from helpers.tunes import TWO_RANKS

from ladder.errors import UsageError
from ladder.events.protocol import FailedEvent
from ladder.events.trial_run import TrialRun
from ladder.events.verdict import false_start, judge
from ladder.launch.jobs import files
from ladder.launch.jobs.job import Asked
from ladder.launch.jobs.launcher import JobsLauncher, ended_by_slurm
from ladder.launch.watch import now
from ladder.machine.described import Machine
from ladder.machine.lease import Leases
from ladder.simulation.paper_machine import read_machine
from ladder.tuning.declaring import checked
from ladder.tuning.job_options import mem_of, more_of
from ladder.tuning.option_checks import require_effective_options
from ladder.tuning.options import TuneOptions
from ladder.tuning.paper_venue import OnPaper
from ladder.tuning.run import run_tune
from ladder.tuning.tune_events import Subscriber
from ladder.tuning.venue import OpenVenue
from ladder.units import GIB


def test_what_is_appended_is_read_once_and_up_to_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    files.create(folder, 2)
    said = files.Appended(files.events(folder, 1))
    assert said.read() == b""
    files.append(files.events(folder, 1), b'{"event": ')
    assert (said.read(), said.is_over) == (b'{"event": ', False)
    files.append(files.events(folder, 1), b'"here"}\n' + files.END)
    assert (said.read(), said.is_over) == (b'"here"}\n', True)
    assert files.Appended(files.events(folder, 0)).read() == b""


def test_a_job_asks_slurm_for_what_the_user_wants_and_is_not_queued_again(tmp_path: Path) -> None:
    more = more_of(TuneOptions(job_options=("constraint=a100", "exclusive")))
    asked = Asked(nodes=2, time="02:00:00", account="me", cpus_per_task=64, gpus_per_node="a100:8", more=more)
    told = asked.parameters("ladder-1", tmp_path)
    assert (told["nodes"], told["ntasks_per_node"], told["account"], told["gpus_per_node"]) == (2, 1, "me", "a100:8")
    assert told["srun_args"] == ["--kill-on-bad-exit=1", "--cpus-per-task=64"]
    assert told["additional_parameters"] == {
        "time": "02:00:00",
        "no-requeue": True,
        "chdir": str(tmp_path),
        "constraint": "a100",
        "exclusive": True,
    }


@pytest.mark.parametrize(
    ("option", "said"),
    [("nodes=2", "is what ladder decides itself"), ("time=10", "give it as --time"), ("output=x", "decides itself")]
    + [(name, "decides itself") for name in ("clusters=b", "cluster=b", "quiet", "hold", "help", "version", "usage")],
)
def test_an_option_of_sbatch_that_is_ladder_s_own_is_refused(option: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        more_of(TuneOptions(job_options=(option,)))


def test_an_option_of_sbatch_cannot_end_its_line() -> None:
    with pytest.raises(UsageError, match=r"--job-option: .* is not valid; give one like constraint=a100 or exclusive"):
        checked(TuneOptions(job_options=("exclusive\n#SBATCH --wrap=evil",)))


def test_options_of_jobs_are_refused_where_none_is_submitted() -> None:
    with pytest.raises(UsageError, match="--account is about the jobs of --launcher slurm-jobs"):
        require_effective_options(TuneOptions(model="tiny-llama", account="me"))
    require_effective_options(TuneOptions(model="tiny-llama", account="me", launcher="slurm-jobs"))


def test_a_node_s_host_memory_is_its_share_of_the_ranks_and_8_gib() -> None:
    assert mem_of(TuneOptions(), 480 * GIB, 2) == "248G"
    assert mem_of(TuneOptions(mem="400G"), 480 * GIB, 2) == "400G"
    assert mem_of(TuneOptions(), None, 2) == ""


def ended(folder: Path, state: str) -> TrialRun:
    """A trial in which a rank reports that the other one is gone, and Slurm ended the job."""
    lost = FailedEvent(t=2.0, candidate=None, outcome="crash", moment="warmup", message="Connection closed by peer")
    run = TrialRun(spec=tiny_trial(folder, 1), events=[[lost], []], exits={0: 1, 1: -15}, started=1.0, ended=3.0)
    ended_by_slurm(run, state, "12")
    return run


def test_a_job_that_slurm_ends_says_nothing_about_the_candidate(tmp_path: Path) -> None:
    run = ended(tmp_path, "TIMEOUT")
    why = "Slurm ended job 12 during the trial: its time limit was reached"
    assert false_start(run, []) == why
    (record,) = judge(run, bundled_workload(), [make_candidate("zero2")])
    assert (record.outcome.kind, record.outcome.sentence) == ("crash", why)
    (record,) = judge(greedy := ended(tmp_path, "OUT_OF_MEMORY"), bundled_workload(), [make_candidate("zero2")])
    assert record.outcome.kind == "host_oom", "this is its fault"
    assert not false_start(greedy, [record])


def test_the_queue_is_read_in_submitit_s_own_way() -> None:
    pytest.importorskip("submitit", reason="submitit is not installed (pip install 'oom-ladder[slurm-jobs]')")
    from ladder.launch.jobs.keeper import Queue, seconds_of

    queue = Queue("ladder-1")
    queue.register_job("12")
    queue.register_job("13")
    found = queue.read_info("JOBID|STATE|NODELIST|REASON|TIME_LEFT\n12|PENDING||Resources|1-02:03:04\n")
    assert (found["12"]["State"], found["12"]["Reason"], found["13"]["State"]) == ("PENDING", "Resources", "GONE")
    assert seconds_of(found["12"]["TimeLeft"]) == 93784
    assert [seconds_of(text) for text in ("59:58", "0:07", "UNLIMITED", "INVALID")] == [3598, 7, None, None]


def test_the_time_in_the_queue_before_the_search_is_not_of_the_time_budget() -> None:
    jobs: Any = SimpleNamespace(waited=3600.0)
    launcher = JobsLauncher(jobs, lambda: ([], ""), ranks=1)
    venue = OpenVenue(machine=TWO_RANKS, launcher=launcher, clock=launcher.now)
    began = now() - 3610
    assert 10 <= venue.seconds_since(began) < 20


@pytest.mark.parametrize(
    ("state", "has_begun", "since", "way"),
    [
        ("PENDING", False, 100, "standard"),
        ("PENDING", True, 0, "force"),
        ("", True, 0, "force"),
        ("RUNNING", False, 100, "standard"),
        ("RUNNING", True, 1, "cache"),
        ("RUNNING", True, 61, "force"),
        ("SUSPENDED", True, 100, "standard"),
    ],
)
def test_slurm_is_asked_at_once_only_about_a_job_that_runs_unknown_to_us(
    state: str, has_begun: bool, since: float, way: str
) -> None:
    pytest.importorskip("submitit", reason="submitit is not installed (pip install 'oom-ladder[slurm-jobs]')")
    from ladder.launch.jobs.keeper import way_to_look

    assert way_to_look(state, has_begun, since) == way


def test_a_tune_that_fails_before_its_first_trial_ends_what_the_venue_began(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []

    class Watched(OnPaper):
        def machine(self) -> Machine:
            said.append("begun")
            return super().machine()

        def close(self) -> None:
            said.append("ended")

    def watched(options: TuneOptions, leases: Leases, tell: Subscriber, cancelled: Callable[[], bool]) -> Watched:
        return Watched(read_machine("a100-80"), options, tell, cancelled)

    monkeypatch.setattr("ladder.tuning.run.venue_of", watched)
    with pytest.raises(UsageError, match="cannot be divided evenly over 8 ranks"):
        run_tune(TuneOptions(model="tiny-llama", launcher="simulated", machine="a100-80", global_batch_size=7, gpus=8))
    assert said == ["begun", "ended"]
