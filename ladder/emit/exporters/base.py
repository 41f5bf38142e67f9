"""The base class of exporters, which write the answer as a fragment for one training program's files."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ladder.candidates import Export
from ladder.emit.files import OutputPaths
from ladder.emit.nodes import torchrun_options
from ladder.emit.settings import YOUR_MODEL, Settings
from ladder.emit.trainer import trainer_arguments, trainer_command_line
from ladder.errors import UsageError
from ladder.text import shown


class Exporter(ABC):
    """One training program, with the keys of its own schema."""

    name: str
    """The NAME in `ladder export --for NAME`."""
    trains_causal_lms_only = False
    words_of_adapters: Mapping[str, str] | None = None
    """By arguments of peft's LoraConfig beyond the usual ones: the program's own words; None if it has no adapters of
    its own."""
    program: tuple[str, ...] = ()
    """What a launcher starts to train with its own file; empty where `training_words` are the Trainer's."""

    def training_words(self, settings: Settings, config: Path) -> dict[str, Any]:
        """How it trains, in its own words, without model, data and adapters."""
        return trainer_arguments(settings, config)

    @abstractmethod
    def text(self, settings: Settings, document: Mapping[str, Any], config: Path) -> str:
        """The fragment, made from the content of the best_config.json at `config`."""

    def require_possible(self, settings: Settings, task: str, config: Path) -> None:
        """UsageError if the program does not train such models, or has no settings for the answer."""
        if self.trains_causal_lms_only and task != "causal-lm":
            raise UsageError(f"--for {self.name}: it trains only causal-lm models, and this answer is for {task}.")
        if self.trains_causal_lms_only and settings.freeze:
            raise UsageError(
                f"--for {self.name}: it cannot freeze {', '.join(settings.freeze)} as it was measured; "
                "use --for trainer with a script that does."
            )
        words, more = self.words_of_adapters, settings.lora.more if settings.lora is not None else {}
        for name in more:
            if words is not None and name not in words:
                raise UsageError(f"--for {self.name}: it has no word for {name} of adapters; use --for trainer.")
        for said in (*self._said(settings), settings.backend.export(self.name, settings, str(config))):
            if isinstance(said, str):
                raise UsageError(f"--for {self.name}: {said}.")

    def apply(self, settings: Settings, fragment: dict[str, Any]) -> list[str]:
        """Change `fragment` for the answer's techniques and way of checkpointing; returns comments."""
        notes = []
        for said in self._said(settings):
            assert isinstance(said, Export)  # `require_possible` has refused the others
            for name, value in said.changes.items():
                fragment.pop(name, None)
                if value is not None:
                    fragment[name] = value
            notes += [f"# {said.note}"] if said.note else []
        return notes

    def more_of_adapters(self, settings: Settings) -> dict[str, Any]:
        """Keys of the fragment for what adapters say beyond the usual arguments."""
        words = self.words_of_adapters or {}
        return {words[name]: value for name, value in settings.lora.more.items()} if settings.lora is not None else {}

    def of_backend(self, settings: Settings, config: Path) -> Mapping[str, Any]:
        """Keys of the fragment for the answer's backend."""
        said = settings.backend.export(self.name, settings, str(config))
        assert isinstance(said, Export)  # as above
        return said.changes

    def _said(self, settings: Settings) -> list[Export | str]:
        way = settings.way_of_checkpointing
        said = [technique.export(self.name) for technique in settings.techniques]
        return [*said, way.export(self.name)] if way else said


def making_accelerate(config: Path) -> str:
    """The command that writes the file for accelerate beside `config`, which may have been copied without it."""
    accelerate = OutputPaths.beside(config).accelerate
    words = ["ladder", "export", str(config), "--for", "accelerate", "--output", str(accelerate)]
    return shlex.join(words)


def launch_line(settings: Settings, config: Path) -> str:
    """The command with torchrun and the Trainer's arguments; the script and its own arguments are "$@"."""
    arguments = trainer_command_line(trainer_arguments(settings, config))
    return f'torchrun {torchrun_options(settings.world_size, settings.num_nodes)} "$@" {arguments}'


def export_lines(settings: Settings) -> list[str]:
    """The environment as `export` commands for a shell."""
    return [f"export {name}={shlex.quote(value)}" for name, value in settings.environment.items()]


def opening_comment(settings: Settings, run: str) -> str:
    """A comment with what to add to the fragment, how to `run` it, and its warnings."""
    environment = " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.environment.items())
    yours = ""
    if settings.model == YOUR_MODEL:
        yours = f"# Replace `{YOUR_MODEL}` with the name of your model: {shown(settings.shape)} is only a shape.\n"
    said = as_text(warning_comments(settings))
    return f"# Written by ladder. Add your data and learning rate, then:\n#   {environment} {run}\n{said}{yours}"


def warning_comments(settings: Settings) -> list[str]:
    """The answer's warnings as comments for a script or YAML; for a simulated answer, they say that it is simulated."""
    return [f"# Warning: {shown(warning)}." for warning in settings.warnings]


def as_text(lines: Iterable[str]) -> str:
    """The lines joined, each with a line break."""
    return "".join(f"{line}\n" for line in lines)
