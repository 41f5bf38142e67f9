"""Tunes over the two nodes of a real Slurm, and over two hosts by a real ssh; trials run real DeepSpeed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from helpers import TINY_CONFIG, processes_with, wait_until
from helpers.clusters import LADDER, Cluster, Slurm, free_ports, running_slurm
from helpers.scripts import SCRIPTS, folder_with_inputs

from ladder.emit import load_best_config
from ladder.launch.nodes.cluster import Cluster as Nodes
from ladder.launch.nodes.cluster import Wanted
from ladder.launch.nodes.connection import close_all
from ladder.launch.nodes.hostfile import hostfile_nodes
from ladder.launch.nodes.slurm import nodes_among
from ladder.runs.stored_run import read_run

EXAMPLES = Path(__file__).parents[2] / "examples"
ON_TWO = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2"]
TUNE = [*LADDER, "tune", "tiny-llama", "--gpus", "0", "--backend", "deepspeed", "--quiet"]
_ALLOCATION = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_CPUS_PER_NODE": "2(x2)"}
Check = Callable[[], None]


MEASURE = [*LADDER, "doctor", "--measure", "--gpus", "0", "--format", "json"]


def meeting_here() -> list[str]:
    """Both nodes are this host, which has no name that Slurm's resolve to, and where other trainings take ports."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where accelerate and ladder are
    return ["env", f"PATH={path}", "MASTER_ADDR=127.0.0.1", f"MASTER_PORT={free_ports(1)[0]}"]


def measured_rates(done: subprocess.CompletedProcess[str]) -> dict[str, float]:
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["nodes"]["sentence"].endswith(", with 1 rank each")
    assert "collectives between nodes" in checks["speeds"]["sentence"]
    return dict(checks["speeds"]["facts"]["rates"])


def test_doctor_measures_the_nodes_of_a_job_and_a_tune_uses_it_is_proven_and_its_files_train_on_both(
    slurm: Slurm, tmp_path: Path, leaves_nothing: Check
) -> None:
    cache = {"LADDER_CACHE": str(tmp_path / "cache")}
    done = slurm.run(*ON_TWO, *MEASURE, "--nodes", "2", folder=tmp_path, timeout=240, environment=cache)
    rates = measured_rates(done)
    assert 1e6 < rates["network_bytes"] < 1e12
    leaves_nothing()
    tune = [*TUNE, "--nodes", "2", "--time-budget", "10s", "--run-dir", "run"]
    done = slurm.run(*ON_TWO, *tune, folder=tmp_path, timeout=240, environment=cache)
    assert done.returncode == 0, done.stderr
    assert read_run(tmp_path / "run").space.rates == tuple(sorted(rates.items()))
    section = load_best_config(tmp_path / "best_config.json")["ladder"]
    assert (section["num_nodes"], section["world_size"]) == (2, 2)
    assert section["proof"]["tokens_per_second"] > 0
    leaves_nothing()
    verified = slurm.run(
        *ON_TWO, *LADDER, "verify", "best_config.json", "--tolerance", "0.9", folder=tmp_path, timeout=240
    )
    assert verified.returncode == 0, verified.stderr
    assert "Nodes: node1, node2, with 1 rank each." in verified.stdout + verified.stderr
    for name in ("train_accelerate.py", "tiny.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    launch = ["srun", "--nodes=2", "--ntasks-per-node=1", "bash", "best_config.launch.sh", "train_accelerate.py"]
    trained = slurm.run(*ON_TWO, *meeting_here(), *launch, folder=tmp_path, timeout=240)
    assert trained.returncode == 0, trained.stderr
    assert f"accelerate: ZeRO stage {section['rung'][4]}, losses" in trained.stdout


def test_a_step_has_all_cores_of_its_node_though_no_variable_says_how_many(slurm: Slurm, tmp_path: Path) -> None:
    """srun of Slurm 22.05 and later gives a step one core, unless SRUN_CPUS_PER_TASK or an option says more."""
    job = slurm.submit("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", "--wrap=sleep 60", folder=tmp_path)
    slurm.wait_for(job, "RUNNING")
    (node,) = nodes_among(["node1"], 1, {**_ALLOCATION, "SLURM_JOB_ID": job})
    show = ["sh", "-c", 'scontrol --oneliner show step "$SLURM_JOB_ID.$SLURM_STEP_ID"']
    done = slurm.run(*node.command(show), folder=tmp_path)
    slurm.run("scancel", job, folder=tmp_path)
    assert " CPUs=2 " in done.stdout, done.stdout + done.stderr


def test_hosts_meet_at_an_address_that_is_not_localhost(
    ssh: Cluster, tmp_path: Path, trial_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On each of the hosts 127.0.0.1 is the host itself, as where its own name stands for localhost."""
    monkeypatch.setenv("PATH", ssh.environment["PATH"])
    (tmp_path / "hosts").write_text("worker-1 slots=1\nworker-2 slots=1\n")
    nodes, _ = hostfile_nodes(tmp_path / "hosts", None)
    wanted = Wanted(gpus=0, gpu_memory=None, host_memory=None, nvme_path=None)
    with closing(Nodes(nodes, wanted, lambda: False)) as both:
        job = {"model_config": TINY_CONFIG, "task": "causal-lm", "operators": []}
        agents, address = both.opened(tmp_path, "ladder-test-address", job, trial_environment, cold=False)
        close_all(agents)
    assert f"HostName {address}\n" in (ssh.folder / "ssh_config").read_text()


def test_a_job_that_is_over_is_told(slurm: Slurm, tmp_path: Path) -> None:
    over = ["env", "SLURM_JOB_ID=999999", "SLURM_JOB_NODELIST=node[1-2]"]
    done = slurm.run(*over, *TUNE, "--nodes", "2", folder=tmp_path, timeout=240)
    assert done.returncode == 4
    assert "Node node1 cannot run trials: " in done.stderr
    assert "Expired or invalid job 999999" in done.stderr


def _begun(slurm: Slurm, folder: Path) -> subprocess.Popen[bytes]:
    """A tune over two nodes in the middle of a trial."""
    command = [*ON_TWO, *TUNE, "--nodes", "2", "--run-dir", "run", "--time-budget", "25s"]
    tune = slurm.begin(*command, folder=folder)
    wait_until(lambda: any("step" in file.read_text() for file in (folder / "run").glob("trials/*/rank1.jsonl")), 60)
    return tune


def test_a_step_that_is_cancelled_during_a_trial_costs_that_trial_alone(
    slurm: Slurm, tmp_path: Path, leaves_nothing: Check
) -> None:
    tune = _begun(slurm, tmp_path)
    steps = slurm.run("squeue", "--steps", "--noheader", "--format=%i", folder=tmp_path, timeout=240).stdout.split()
    on_a_node = [step for step in steps if step.rpartition(".")[2].isdigit()]
    assert len(on_a_node) == 2
    slurm.run("scancel", max(on_a_node), folder=tmp_path, timeout=240)
    assert tune.wait(timeout=200) == 0, (tmp_path / "out.txt").read_text()
    assert "proof" in load_best_config(tmp_path / "best_config.json")["ladder"]
    leaves_nothing()


def _kill_slurmd(slurm: Slurm, node: str) -> None:
    os.kill(int((slurm.folder / f"slurmd-{node}.pid").read_text()), signal.SIGKILL)


@pytest.mark.night  # beside test_links.py, in which hosts lose each other
def test_a_node_on_which_all_of_slurm_is_killed_is_named_and_nothing_is_left(
    tmp_path: Path, leaves_nothing: Check
) -> None:
    """srun still waits for the step, so the node is lost only when its agent has been silent for 15 seconds."""
    with running_slurm() as slurm:
        tune = _begun(slurm, tmp_path)
        ours = processes_with("LADDER_CACHE", os.environ["LADDER_CACHE"])
        on_nodes = [each for each in ours if "SLURMD_NODENAME" in each.environ()]  # not a server that tests share
        servers = [each for each in on_nodes if "ladder.trial.server" in each.cmdline()]
        (agent,) = [
            each
            for each in on_nodes
            if "ladder.launch.nodes.agent" in each.cmdline() and each.environ()["SLURMD_NODENAME"] == "node2"
        ]
        step = agent.parent()
        assert step is not None
        assert len(servers) >= 2  # a server's ranks are forks of it
        _kill_slurmd(slurm, "node2")
        step.kill()
        assert psutil.wait_procs([agent, *servers], timeout=25)[1] == []
        assert tune.wait(timeout=200) == 4
        said = (tmp_path / "out.txt").read_text()
        assert said.startswith("ladder: Node node2 cannot run trials: its connection ended (srun: Job step aborted)")
        leaves_nothing()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.night), signal.SIGKILL])
def test_a_tune_that_is_ended_leaves_nothing_on_any_node(
    slurm: Slurm, tmp_path: Path, leaves_nothing: Check, number: signal.Signals
) -> None:
    tune = _begun(slurm, tmp_path)
    below = psutil.Process(tune.pid).children(recursive=True)  # another test's tune may run beside
    (controller,) = [each for each in below if each.cmdline()[1:4] == ["-m", "ladder.cli.main", "tune"]]
    controller.send_signal(number)
    began = time.monotonic()
    tune.wait(timeout=30)
    assert time.monotonic() - began < 10
    leaves_nothing()


def test_a_host_that_ssh_does_not_know_is_named_with_what_ssh_says(ssh: Cluster, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("worker-1 slots=1\nnobody.invalid slots=1\n")
    done = ssh.run(*TUNE, "--hostfile", "hosts", folder=tmp_path, timeout=240)
    assert done.returncode == 4
    assert "Node nobody.invalid cannot run trials: its connection ended (ssh: Could not resolve" in done.stderr


def test_a_script_is_tuned_over_two_nodes_as_it_is_and_trains_on_both_with_the_answer(
    slurm: Slurm, tmp_path: Path, script_inputs: Path, leaves_nothing: Check
) -> None:
    folder_with_inputs(tmp_path, script_inputs)
    script = [str(SCRIPTS / "causal_trainer.py"), "--model_name_or_path", "model", "--train_file", "text/train.jsonl"]
    options = ["--nodes", "2", "--gpus", "0", "--rung", "zero2", "--micro-batch", "4", "--quiet"]
    command = ["--", *script, "--output_dir", "out", "--max_steps", "3"]
    done = slurm.run(*ON_TWO, *LADDER, "tune", *options, *command, folder=tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr
    section = load_best_config(tmp_path / "best_config.json")["ladder"]
    assert (section["num_nodes"], section["world_size"]) == (2, 2)
    assert not (tmp_path / "out").exists()
    leaves_nothing()
    launch = ["srun", "--nodes=2", "--ntasks-per-node=1", "bash", "best_config.launch.sh"]
    trained = slurm.run(*ON_TWO, *meeting_here(), *launch, folder=tmp_path, timeout=200)
    assert trained.returncode == 0, trained.stderr
    (state,) = (tmp_path / "out").glob("checkpoint-*/trainer_state.json")
    assert json.loads(state.read_text())["train_batch_size"] == 4
