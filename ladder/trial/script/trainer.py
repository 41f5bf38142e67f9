"""Taking hold of the Trainer of transformers, and of what is built on it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ladder.events.protocol import CheckpointEvent
from ladder.trial.measuring import measure_all
from ladder.trial.model import set_checkpointing
from ladder.trial.reporter import now
from ladder.trial.script import generating
from ladder.trial.script.generating import GeneratingSubject, RealStepsOfGenerating
from ladder.trial.script.hold import Grip, NotTakenHoldOfError, too_few
from ladder.trial.script.planned import require_planned_trainer, train_counted
from ladder.trial.script.trainer_facts import own_schedule, planned_steps, trainer_facts
from ladder.trial.script.trainer_proof import RealStepsOfTrainer
from ladder.trial.script.trainer_steps import TrainerSubject
from ladder.trial.wrapping import wrap

# What a trial must not do: write into the user's folders, and tell the user's trackers.
_CONTAINED: dict[str, Any] = {"report_to": "none", "push_to_hub": False}
# Other ways to train than the answer's.
_OTHER_WAYS: dict[str, Any] = {
    "auto_find_batch_size": False,
    "fsdp": TrainingArguments.__dataclass_fields__["fsdp"].default,  # "" before transformers 4.57, then None
    "fsdp_config": None,
}

# Of a look: the model stays on the host, as nothing is trained.
_LOOKING: dict[str, Any] = {"deepspeed": None, "use_cpu": True, "bf16": False, "fp16": False, "tf32": None}


_MANY = 1 << 20
"""Optimizer steps. Chosen: more than any proof."""


def hold_trainer(grip: Grip) -> None:
    """From now on every Trainer of this process is looked at, or trained as the trial says, once it begins to."""

    def held(own: Any, trainer: Trainer, *arguments: Any, **options: Any) -> Any:
        _set_again(grip, trainer.args)
        if grip.is_look:
            grip.looked(lambda: trainer_facts(trainer))
        if grip.is_run:
            more = {"resume_from_checkpoint": grip.script.resume} if grip.script.resume else {}
            return train_counted(grip, trainer, lambda: own(trainer, *(() if more else arguments), **options | more))
        trainer.add_callback(_Held(trainer, grip))
        # A proof ends when its steps are timed, however few the script would make. It evaluates when they are.
        trainer.args.max_steps, trainer.args.eval_on_start = _MANY, False
        try:
            own(trainer)  # without a checkpoint to go on from
        except BaseException as error:
            grip.leave(error)
        grip.leave(too_few(grip))

    def wrapped(own: Any, trainer: Trainer, model: Any, training: bool = True, **options: Any) -> Any:
        """Its engine is made next."""
        if training and not grip.spec.candidates[0].checkpoint_every:
            # The Trainer only switches on; a script may have done so itself, as prepare_model_for_kbit_training does.
            set_checkpointing(trainer.model, grip.spec.candidates[0])
        if training and not grip.is_run:
            grip.reporter.phase("engine")
        return own(trainer, model, training, **options)

    _hold_arguments(grip)
    wrap(Trainer, "train", held)
    _hold_evaluation(grip)
    if grip.is_run:
        _note_checkpoints(grip)
    wrap(Trainer, "_wrap_model", wrapped)


def _hold_arguments(grip: Grip) -> None:
    """Let all TrainingArguments say what the trial or the answer says."""

    def replaced(own: Any, arguments: Any) -> None:
        grip.holders.add("trainer")
        said = {name: copy.copy(getattr(arguments, name, None)) for name in _OWN}
        said["kernels"] = {name: getattr(arguments, name, None) for name in grip.script.kernels}
        if grip.is_look:
            generating.refuse_servers(arguments, grip)
        changes = {**_OTHER_WAYS}
        if not grip.is_run:
            changes |= {"output_dir": grip.script.scratch, **_CONTAINED}
        changes |= _LOOKING | generating.looking(arguments) if grip.is_look else grip.script.arguments
        if changes["deepspeed"] and (schedule := own_schedule(said["deepspeed"])):
            changes["deepspeed"] = {**changes["deepspeed"], "scheduler": schedule}
        if _begins_no_state(arguments):
            changes["deepspeed"] = None
        if _CONFIG in changes:
            changes[_CONFIG] = own_config(arguments) | changes[_CONFIG]
        for name, value in changes.items():
            if hasattr(arguments, name):
                setattr(arguments, name, copy.deepcopy(value))
        own(arguments)
        arguments._ladder_own = said

    def made(own: Any, trainer: Trainer, *given: Any, **options: Any) -> None:
        arguments = options.get("args", given[1] if len(given) > 1 else None)
        if arguments is not None:
            _set_again(grip, arguments)
            if grip.spec.uses_deepspeed and not grip.is_look and arguments.deepspeed is None:
                grip.leave(NotTakenHoldOfError(_OF_ANOTHER_STATE))
        own(trainer, *given, **options)

    wrap(TrainingArguments, "__post_init__", replaced)
    wrap(Trainer, "__init__", made)


def _begins_no_state(arguments: Any) -> bool:
    """Whether they take the state of accelerate that is there, which on a CPU is none of DeepSpeed.

    sentence-transformers makes such ones beside those that it trains with, to describe its defaults.
    """
    return bool(own_config(arguments).get("use_configured_state"))


_CONFIG = "accelerator_config"


def own_config(arguments: Any) -> dict[str, Any]:
    """What the script says to accelerate: as an object, a dictionary, a text of JSON or the path of one."""
    config = getattr(arguments, _CONFIG, None) or {}
    if isinstance(config, str):
        config = json.loads(config if config.lstrip().startswith("{") else Path(config).read_text(encoding="utf-8"))
    return dict(config if isinstance(config, dict) else config.to_dict())


_OF_ANOTHER_STATE = (
    "it trains with TrainingArguments whose accelerator_config has use_configured_state, so that no DeepSpeed "
    "configuration can be given to them; leave that out"
)
_SET_LATER = ("per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm", "optim")
"""Arguments that scripts set once they have made the others."""


def _set_again(grip: Grip, arguments: Any) -> None:
    """What the trial or the answer says counts, whatever the script has set since; a look notes it."""
    for name in _SET_LATER:
        if grip.is_look:
            arguments._ladder_own[name] = getattr(arguments, name)
        elif name in grip.script.arguments:
            setattr(arguments, name, grip.script.arguments[name])


def _hold_evaluation(grip: Grip) -> None:
    """Let a script evaluate before it trains, where the model is whole: the Trainer would refuse it with DeepSpeed."""

    def evaluated(own: Any, trainer: Trainer, *arguments: Any, **options: Any) -> Any:
        if trainer.is_in_train or not trainer.is_deepspeed_enabled or trainer.deepspeed is not None:
            return own(trainer, *arguments, **options)
        is_whole = grip.spec.zero_stage < 3  # else an engine is made for it, after which none is made to train with
        if not (is_whole or grip.is_run):
            said = "it evaluates before it trains, which the Trainer cannot do at stage 3 of ZeRO; evaluate in another"
            grip.leave(NotTakenHoldOfError(f"{said} script, or leave out the rungs of that stage"))
        trainer.is_deepspeed_enabled = not is_whole
        try:
            return own(trainer, *arguments, **options)
        finally:
            trainer.is_deepspeed_enabled = True

    wrap(Trainer, "evaluation_loop", evaluated)


def _note_checkpoints(grip: Grip) -> None:
    """Let every Trainer of a run report that it wrote or read a checkpoint."""

    def saved(own: Any, trainer: Trainer, *arguments: Any, **options: Any) -> None:
        own(trainer, *arguments, **options)
        if not trainer.args.save_only_model:
            folder = Path(trainer.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
            grip.reporter.send(CheckpointEvent(t=now(), folder=str(folder.absolute())))

    def loaded(own: Any, *arguments: Any, **options: Any) -> None:
        own(*arguments, **options)
        grip.reporter.send(CheckpointEvent(t=now()))

    wrap(Trainer, "_save_checkpoint", saved)
    if not grip.spec.uses_deepspeed:  # whose engine says itself what it reads
        wrap(Trainer, "_load_from_checkpoint", loaded)


_OWN = (
    "deepspeed",
    "fsdp",
    "fsdp_config",
    "bf16",
    "fp16",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "activation_checkpointing",
    "eval_strategy",
    "do_eval",
    "save_strategy",
    "optim",
    "max_grad_norm",
    "auto_find_batch_size",
    "use_cpu",
    *generating.SETTINGS,
)


class _Held(TrainerCallback):  # type: ignore[misc]
    """Takes the training over once its engine stands, and lets it do nothing but train.

    It is the last callback. So the script's settings of evaluation and saving stay, for those who check them.
    """

    def __init__(self, trainer: Trainer, grip: Grip) -> None:
        self._trainer, self._grip, self._own_max_steps = trainer, grip, trainer.args.max_steps

    def on_train_begin(self, *_: Any, train_dataloader: Any = None, **__: Any) -> None:
        trainer, grip = self._trainer, self._grip
        grip.saves.redirect()
        generates = generating.generates(trainer)
        if generates:
            generating.show_progress(trainer, grip)
        if grip.spec.proof:
            if not generates:
                self._require_planned(train_dataloader)
            steps = RealStepsOfGenerating if generates else RealStepsOfTrainer
            trainer.add_callback(steps(trainer, grip))
            return
        subject = GeneratingSubject(trainer, grip) if generates else TrainerSubject(trainer, grip)
        grip.held("trainer", lambda: measure_all(grip.spec, subject, grip.reporter, grip.gauge))

    def _require_planned(self, loader: Any) -> None:
        trainer, many = self._trainer, self._trainer.args.max_steps
        trainer.args.max_steps = self._own_max_steps
        require_planned_trainer(self._grip, trainer, planned_steps(trainer, loader))
        trainer.args.max_steps = many

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_evaluate = control.should_save = control.should_log = False
        control.should_training_stop = control.should_epoch_stop = False

    on_step_begin = on_substep_end = on_epoch_begin = on_epoch_end = on_step_end
