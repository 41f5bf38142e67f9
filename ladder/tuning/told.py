"""A script's arguments with values of the answer: in its options, and in copies of its configuration files."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ladder.workload.script import with_option

_SUFFIXES = (".yaml", ".yml", ".json")
_OF_DEEPSPEED = {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"}
"""Keys that no configuration of DeepSpeed lacks all of: https://www.deepspeed.ai/docs/config-json/."""


@dataclass(frozen=True)
class Place:
    """Where a value stands: at an option or in a setting, or at the `keys` in a file."""

    name: str
    """The option, or the file's path as the arguments have it."""
    keys: tuple[str, ...] = ()

    @property
    def last(self) -> str:
        """What it is called there."""
        return (self.keys or (self.name,))[-1]


@dataclass(frozen=True)
class Told:
    """Arguments of a script, with changes."""

    arguments: tuple[str, ...]
    changed: Mapping[str, Any] = field(default_factory=dict)
    """What stands in a file now, by its path as the arguments have it."""

    def files(self) -> dict[str, Any]:
        """The configuration files that the arguments name, with what stands in them; mappings alone."""
        return dict(_read(self.arguments)) | dict(self.changed)

    def of_deepspeed(self) -> list[str]:
        """Those of them that configure DeepSpeed and name neither an optimizer nor a schedule, which would be lost."""
        own = {name: document for name, document in self.files().items() if _OF_DEEPSPEED & document.keys()}
        return [name for name, document in own.items() if not {"optimizer", "scheduler"} & document.keys()]

    def places(self, value: int) -> list[Place]:
        """Where this number stands in options that were typed and in files."""
        words = zip(self.arguments, (*self.arguments[1:], ""), strict=True)
        split = [(*word.partition("="), following) for word, following in words]
        # `--size 4`, `--size=4`, and `train.size=4` as Hydra and OmegaConf have it
        options = [
            Place(name)
            for name, equals, given, following in split
            if (given if equals else following if name.startswith("-") else "") == str(value)
        ]
        of_files = [
            Place(name, keys)
            for name, document in self.files().items()
            if not _OF_DEEPSPEED & document.keys()
            for keys, found in _leaves(document)
            if found == value and not isinstance(found, bool)
        ]
        return list(dict.fromkeys(options + of_files))

    def named(self, names: Sequence[str]) -> Place | None:
        """The first section of a file that has one of `names` for a key."""
        for file, document in self.files().items():
            for keys, _ in _leaves(document):
                if keys[-1] in names:
                    return Place(file, keys[:-1])
        return None

    def at(self, place: Place, value: Any) -> Told:
        """With `value` there."""
        if not place.keys:
            return replace(self, arguments=with_option(self.arguments, place.name, str(value)))
        document = copy.deepcopy(self.files()[place.name])
        section = document
        for key in place.keys[:-1]:
            section = section[key]
        section[place.keys[-1]] = value
        return replace(self, changed={**self.changed, place.name: document})

    def instead(self, name: str, other: str) -> Told:
        """With the file `other` in place of the file `name`."""
        words = (word.removesuffix(name) + other if _named(word) == name else word for word in self.arguments)
        return replace(self, arguments=tuple(words))

    def written(self, folder: Path, stem: str) -> tuple[tuple[str, ...], dict[Path, str]]:
        """The arguments with copies of changed files in `folder`, whose names begin with `stem`; and their texts."""
        from ladder.emit.accelerate import to_yaml

        told, texts = self, {}
        for name, document in self.changed.items():
            path = folder / f"{stem}.{Path(name).name}"
            texts[path] = json.dumps(document, indent=2) + "\n" if path.suffix == ".json" else to_yaml(document)
            told = told.instead(name, str(path))
        return told.arguments, texts


def _named(word: str) -> str:
    """The file that a word of the arguments may name."""
    return word.partition("=")[2] if word.startswith("-") else word


def _read(arguments: Sequence[str]) -> Iterator[tuple[str, Any]]:
    import yaml

    for name in map(_named, arguments):
        if Path(name).suffix not in _SUFFIXES or not Path(name).is_file():
            continue
        try:
            document = yaml.safe_load(Path(name).read_text(encoding="utf-8"))  # JSON is YAML
        except (OSError, ValueError, yaml.YAMLError):  # one that only its program understands
            continue
        if isinstance(document, dict):
            yield name, document


def _leaves(document: Mapping[Any, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in document.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value
