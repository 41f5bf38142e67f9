"""The answer in the words of the user's own script: its command with options of its own, which needs no ladder."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ladder.backends.registry import is_main
from ladder.emit.answer import Answer
from ladder.emit.config import best_config, to_json
from ladder.emit.files import OutputPaths
from ladder.emit.trainer import trainer_arguments, trainer_command_line
from ladder.errors import UsageError
from ladder.workload.script import OwnEngine, Script, ScriptFacts, keeps_its_optimizer


def in_own_words(
    answer: Answer, paths: OutputPaths, look: Callable[[Sequence[str]], Script], note: Callable[[str], None]
) -> tuple[str, ...] | None:
    """What torchrun starts to train the answer: the script, its arguments, and the Trainer's that the answer changes.

    A second `look`, at this command, must see the answer's values and the steps of the script's own; `note` gets what
    it sees otherwise, and None is returned, as for a script without such options: `ladder run` then starts it.
    """
    script = answer.workload.script
    if script is None or not _may_be_told(answer, script.facts):
        return None
    arguments = trainer_arguments(answer, paths.config)
    if keeps_its_optimizer(script.facts.optimizer):
        arguments.pop("optim", None)
    words = shlex.split(trainer_command_line(arguments))
    with tempfile.TemporaryDirectory(prefix="ladder-words-") as folder:  # the answer's files are not written yet
        config = Path(folder) / "config.json"
        config.write_text(to_json(best_config(answer)), encoding="utf-8")
        try:
            there = [str(config) if word == str(paths.config) else word for word in words]
            seen = look([*script.command, *there]).facts
        except UsageError:
            note("The script does not take the Trainer's options, so `ladder run` starts it with the answer.")
            return None
    if others := differing(answer, script.facts, seen):
        note(f"The script sets its {', '.join(others)} itself, so `ladder run` starts it with the answer.")
        return None
    own = script.command[len(script.command) - script.facts.num_arguments :]
    return (*script.facts.program, *own, *words)


def _may_be_told(answer: Answer, facts: ScriptFacts) -> bool:
    """Whether the Trainer's options alone say the answer to a script."""
    engine = answer.candidate.engine
    if facts.kind != "trainer" or not facts.takes_options or facts.generation is not None or not facts.program:
        return False
    has_own_files = facts.engine is None or facts.engine.stage is not None
    beyond = any(technique.binds_cores or not technique.trainer_arguments() for technique in engine.techniques)
    is_ignored = answer.device == "cpu" and not is_main(engine.rung) and engine.rung.stage > 0  # by accelerate
    return not (has_own_files or beyond or is_ignored)


def differing(answer: Answer, own: ScriptFacts, seen: ScriptFacts) -> list[str]:
    """What a look at the script under the answer's options `seen` has of its own, by name."""
    candidate, workload = answer.candidate, answer.workload
    planned, again = (_steps(facts, answer) for facts in (own, seen))
    engine = seen.engine or OwnEngine()
    stage = candidate.engine.rung.stage if is_main(candidate.engine.rung) else None
    pairs = {
        "micro-batch": (seen.micro_batch, candidate.micro_batch),
        "accumulation": (seen.accumulation, candidate.accumulation),
        "precision": (seen.dtype, workload.dtype),
        "gradient checkpointing": (engine.checkpointing, candidate.gradient_checkpointing),
        "engine": (engine.stage, stage),
        "gradient clipping": (seen.gradient_clipping, workload.gradient_clipping),
        "trained parameters": (seen.num_trainable, own.num_trainable),
        "longest sample": (seen.longest, own.longest),
        "steps": (again, planned),
    }
    return [name for name, (one, other) in pairs.items() if one != other]


def _steps(facts: ScriptFacts, answer: Answer) -> tuple[int | None, ...]:
    planned = facts.planned(answer.workload.global_batch_size, answer.world_size)
    return () if planned is None else (planned.optimizer_steps, planned.schedule_steps, planned.samples)
