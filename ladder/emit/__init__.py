"""Writes the answer as files: best_config.json, files for the Trainer and accelerate, and a launch script."""

from __future__ import annotations

from pathlib import Path

from ladder.backends.registry import is_main
from ladder.emit.accelerate import accelerate_config, to_yaml
from ladder.emit.answer import Answer
from ladder.emit.config import best_config, launch_environment, load_best_config, original_text, to_json
from ladder.emit.files import OutputPaths, write_files
from ladder.emit.launch import launch_script
from ladder.emit.plain import plain_launch_script, plain_output
from ladder.emit.trainer import trainer_arguments, trainer_command_line

__all__ = [
    "Answer",
    "OutputPaths",
    "accelerate_config",
    "best_config",
    "emit_all",
    "files_of",
    "launch_environment",
    "launch_script",
    "load_best_config",
    "original_text",
    "trainer_arguments",
    "trainer_command_line",
]


def emit_all(answer: Answer, output: Path) -> list[Path]:
    """Write `files_of` an answer; returns their absolute paths. EnvironmentFaultError if one cannot be written."""
    return write_files(files_of(answer, output))


def files_of(answer: Answer, output: Path) -> dict[Path, str]:
    """The texts by absolute path: of `output` (best_config.json), and beside it of its .trainer.json, .accelerate.yaml
    and .launch.sh; for an answer without DeepSpeed, of the same as `plain_output` names them.

    UsageError if `output` cannot be a file name.
    """
    is_plain = not is_main(answer.candidate.engine.rung)
    paths = OutputPaths.beside(plain_output(output) if is_plain else output)
    return {
        paths.config: to_json(best_config(answer)),
        paths.trainer: to_json(trainer_arguments(answer, paths.config)),
        paths.accelerate: to_yaml(accelerate_config(answer, paths.config)),
        paths.launch: (plain_launch_script if is_plain else launch_script)(answer, paths),
        **(answer.own_words.files if answer.own_words is not None else {}),
    }
