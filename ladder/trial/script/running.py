"""Running a user's script in a rank, and what becomes of it."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from typing import Any

import huggingface_hub
import torch.distributed as dist
from accelerate import PartialState
from huggingface_hub import HfApi, RepoUrl, constants
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers.integrations import HfDeepSpeedConfig

from ladder.events.protocol import ScriptSpec, TrialSpec
from ladder.trial.backends import backend_of
from ladder.trial.gauge import Gauge
from ladder.trial.of_deepspeed import is_installed
from ladder.trial.preload import HIDDEN, unhide
from ladder.trial.reporter import Reporter, now
from ladder.trial.script.accelerate_loop import hold_accelerate
from ladder.trial.script.alone import welcome_joining
from ladder.trial.script.elsewhere import refuse_training_elsewhere
from ladder.trial.script.hold import Grip, Leave, NotTakenHoldOfError, name_moments, too_few
from ladder.trial.script.options import note_options
from ladder.trial.script.program import Program, program_of
from ladder.trial.script.saves import Saves
from ladder.trial.script.trainer import hold_trainer
from ladder.workload.script import writing_into

_LOOKED_FOR = "Trainer.train() of transformers, Accelerator.prepare() and deepspeed.initialize()"
_PUBLISHING = ("create_commit", "upload_file", "upload_folder", "upload_large_folder", "create_branch", "create_tag")


def train_script(spec: TrialSpec, script: ScriptSpec, reporter: Reporter, gauge: Gauge, leave: Leave) -> None:
    """Run the script until its training is taken hold of, which ends the process.

    Raises NotTakenHoldOfError if it ends before, UsageError for what cannot be run at all, and whatever the script
    raises.
    """
    reporter.phase("model")
    os.makedirs(script.scratch, exist_ok=True)
    program = program_of(writing_into(script.command, script.scratch))
    grip = take_hold(spec, script, program, reporter, gauge, leave)
    refuse_training_elsewhere(grip)
    refuse_unheld_training(grip)
    publish_nothing()
    if grip.is_look:
        note_options(grip.parsed)
        os.environ.update(program.environment)  # what the launcher was told counts as what the script says
    else:
        name_moments(grip)
        gauge.start(spec.memory_limit)
    os.environ.update(silent_trackers(script.scratch))
    try:
        run_program(program, spec, script)
        _join_threads()
    except SystemExit as ended:
        _join_threads()
        if ended.code not in (None, 0):
            raise NotTakenHoldOfError(f"the script ended with exit status {ended.code} before it trained") from ended
    except EOFError as error:
        if str(error) != "EOF when reading a line":  # what input() says
            raise
        raise NotTakenHoldOfError(
            "the script asks for input, which a trial cannot give; answer it by an option"
        ) from error
    if grip.made.micro_steps:
        raise too_few(grip)
    raise NotTakenHoldOfError(
        f"the script ended without training in a way that ladder knows: it looked for {_LOOKED_FOR} in the process "
        "that it started"
    )


def _join_threads() -> None:
    """Wait for what still runs, as Python does at its end: the training may be there."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def take_hold(
    spec: TrialSpec, script: ScriptSpec, program: Program, reporter: Reporter, gauge: Gauge, leave: Leave
) -> Grip:
    """From now on whatever trains in this process does as `script` says."""
    file = program.file
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    grip = Grip(
        spec,
        script,
        reporter,
        gauge,
        leave,
        began=now(),
        path=str(file),
        digest=digest,
        modules=frozenset(sys.modules),
        saves=Saves(script.scratch, spec.device),
        program=program,
    )
    if dist.is_initialized():
        welcome_joining()
    if spec.device == "cpu":
        PartialState(cpu=True)  # as accelerate's launcher has it; otherwise each rank takes itself for the only one
    if not grip.is_look:
        backend_of(spec).take_hold(spec)
    grip.made.listen()
    hold_trainer(grip)
    hold_accelerate(grip)
    if is_installed():
        from ladder.trial.script.deepspeed_loop import hold_deepspeed

        hold_deepspeed(grip)
    return grip


def run_program(program: Program, spec: TrialSpec, script: ScriptSpec) -> None:
    """Run the script's program in this process."""
    for module in HIDDEN:
        unhide(module)
    # Alive while the script runs: under stage 3 transformers builds every model in shards then.
    is_sharded = script.mode != "look" and spec.zero_stage == 3
    keep_alive = HfDeepSpeedConfig(spec.deepspeed) if is_sharded else None
    program.run()
    del keep_alive


def refuse_unheld_training(grip: Grip) -> None:
    """From now on a look ends, with a report, at the first step of any optimizer.

    Whatever is taken hold of ends a look before it makes a step, so this one is the script's own training.
    """

    def begins(*_: Any) -> None:
        grip.leave(NotTakenHoldOfError(_of_unheld(grip)))

    if grip.is_look:
        register_optimizer_step_pre_hook(begins)


def _of_unheld(grip: Grip) -> str:
    if "accelerate" in grip.holders:
        return (
            "its Accelerator prepares the model and its training data in separate calls; give model, optimizer and "
            "training data to one call of prepare()"
        )
    return f"it trains in a way that ladder does not know: it looked for {_LOOKED_FOR}"


def silent_trackers(scratch: str) -> dict[str, str]:
    """The environment in which trackers show no run: they are off, or write below `scratch`."""
    return {
        "WANDB_MODE": "disabled",
        "COMET_MODE": "DISABLED",
        "DISABLE_MLFLOW_INTEGRATION": "TRUE",
        "SWANLAB_MODE": "disabled",
        "MLFLOW_TRACKING_URI": scratch,
        "TRACKIO_DIR": scratch,
    }


def publish_nothing() -> None:
    """From now on nothing is made or changed on the Hub; it can still be read."""

    def create_repo(*given: Any, **options: Any) -> RepoUrl:
        return RepoUrl(f"{constants.ENDPOINT}/{options.get('repo_id') or given[0]}")

    _replace("create_repo", create_repo)
    for name in _PUBLISHING:
        if hasattr(HfApi, name):
            _replace(name, lambda *_given, **_options: None)


def _replace(name: str, instead: Any) -> None:
    """The method of HfApi, and the function of the same name."""
    setattr(HfApi, name, lambda _api, *given, **options: instead(*given, **options))
    setattr(huggingface_hub, name, instead)
