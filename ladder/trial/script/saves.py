"""What a script saves while a trial trains it lands in the trial's scratch folder, and the script finds it there."""

from __future__ import annotations

import builtins
import io
import os
import sys
import sysconfig
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import accelerate
import safetensors.torch
import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ladder.trial.of_deepspeed import engine_methods
from ladder.trial.subject import most_of_ranks
from ladder.trial.wrapping import wrap

OF_LIBRARIES = ("site-packages", "dist-packages")
"""Folders of installed modules. An environment on top of another has several, as where a cluster provides torch."""

_SAVE = (
    (torch, "save", 1, "f"),
    (safetensors.torch, "save_file", 1, "filename"),
    (PreTrainedModel, "save_pretrained", 1, "save_directory"),
    (PretrainedConfig, "save_pretrained", 1, "save_directory"),
    (PreTrainedTokenizerBase, "save_pretrained", 1, "save_directory"),
    (accelerate.Accelerator, "save_state", 1, "output_dir"),
    (accelerate.Accelerator, "save_model", 2, "save_directory"),
    *((owner, name, 1, "save_dir") for owner, name in engine_methods("save_checkpoint", "save_16bit_model")),
)
"""Who saves, by what, and which argument is the place, by number and by name."""
_LOAD = (
    (torch, "load", 0, "f"),
    (accelerate.Accelerator, "load_state", 1, "input_dir"),
    *((owner, name, 1, "load_dir") for owner, name in engine_methods("load_checkpoint")),
)
_PLACES = (
    *("open", "stat", "lstat", "access", "listdir", "scandir", "readlink"),
    *("rmdir", "remove", "unlink", "chdir", "chmod", "utime", "truncate"),
)
"""Functions of `os` that a script, or Python's own library for it, gives a path."""
_PYTHONS = ("ladder.", "functools", "os", "pathlib", "shutil")
"""Those that make a folder for who called them; Python's others make their own, as for a worker's sockets."""
_OF_PYTHON = sysconfig.get_paths()["stdlib"] + os.sep
_LIBRARIES = (*_PYTHONS, "accelerate.", "torch.", "transformers.", "deepspeed.")
_COPIES = 2
"""Of what a line of the script saves again and again. Chosen: some compare the last one with that before it."""


class Saves:
    """Where they are. Only what was saved since the training began has another place than the script says."""

    def __init__(self, scratch: str, device: str) -> None:
        self._scratch, self._device = Path(scratch).absolute(), device
        self._places: dict[str, str] = {}
        """By the script's path."""
        self._made: dict[str, list[str]] = {}
        """Paths of the script, by the line that saves."""
        self._own = threading.local()
        self._seconds = 0.0

    def redirect(self) -> None:
        """From now on."""
        for owner, name, number, keyword in _SAVE:
            wrap(owner, name, self._with_place(number, keyword, self._saved))
        for owner, name, number, keyword in _LOAD:
            wrap(owner, name, self._with_place(number, keyword, self._loaded))
        safe_open = safetensors.safe_open  # it opens files past Python, and other modules have its name too
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get("safe_open") is safe_open:
                wrap(module, "safe_open", self._opened)
        for module, names in ((builtins, ("open",)), (io, ("open",)), (os, _PLACES)):
            for name in names:
                wrap(module, name, self._opened)
        wrap(os, "mkdir", self._made_folder)
        for name in ("rename", "replace", "link"):
            wrap(os, name, self._renamed)
        wrap(os, "symlink", self._linked)

    def taken(self) -> float:
        """Seconds that ranks needed for saves since the last call; of the slowest, for which the others wait."""
        seconds, self._seconds = self._seconds, 0.0
        return most_of_ranks([seconds], self._device)[0]

    def _with_place(self, number: int, keyword: str, then: Any) -> Any:
        def called(own: Any, *arguments: Any, **options: Any) -> Any:
            given = options.get(keyword) if keyword in options else (arguments[number : number + 1] or (None,))[0]
            if not isinstance(given, str | os.PathLike):  # an open file, or nothing
                return own(*arguments, **options)
            words = list(arguments)

            def with_path(path: str) -> Any:
                if keyword in options:
                    return own(*words, **{**options, keyword: path})
                words[number] = path
                return own(*words, **options)

            return then(with_path, os.fspath(given))

        return called

    def _saved(self, save: Any, path: str) -> Any:
        if getattr(self._own, "is_saving", False):  # a part of another save
            return save(self.place_of(path))
        began, self._own.is_saving = time.perf_counter(), True
        try:
            return save(self._new_place(os.path.abspath(path)))
        finally:
            self._own.is_saving = False
            self._seconds += time.perf_counter() - began

    def _loaded(self, load: Any, path: str) -> Any:
        return load(self.place_of(path))

    def _opened(self, own: Any, *arguments: Any, **options: Any) -> Any:
        if arguments and isinstance(arguments[0], str | Path) and options.get("dir_fd") is None:
            arguments = (self.place_of(arguments[0]), *arguments[1:])
        return own(*arguments, **options)

    def _made_folder(self, own: Any, path: Any, *arguments: Any, **options: Any) -> None:
        """Libraries make theirs for kernels and swapped states, which they do not open by Python."""
        if not (self._is_ours(os.path.abspath(path)) or os.path.exists(path) or called_by(_PYTHONS) is None):
            self._put(path)
        own(self.place_of(path), *arguments, **options)

    def _renamed(self, own: Any, source: Any, target: Any, **options: Any) -> None:
        if self.place_of(source) != source and self.place_of(target) == target:
            self._put(target)
        own(self.place_of(source), self.place_of(target), **options)

    def _linked(self, own: Any, source: Any, target: Any, *arguments: Any, **options: Any) -> None:
        """A link in the scratch folder says the whole path: what is saved lies there under names of its own."""
        whole = os.path.join(os.path.dirname(os.path.abspath(target)), source)
        if self.place_of(whole) != whole and self.place_of(target) == target:
            self._put(target)
        elsewhere = self.place_of(target) != target
        own(self.place_of(whole) if elsewhere else source, self.place_of(target), *arguments, **options)

    def _put(self, path: Any) -> None:
        """From now on `path` has a place of its own."""
        if not self._is_ours(whole := os.path.abspath(path)):
            self._places[whole] = self._named(whole)

    def _named(self, name: str) -> str:
        """A path in the scratch folder, the same on all ranks."""
        os.makedirs(self._scratch / "saved", exist_ok=True)
        return str(self._scratch / "saved" / f"{zlib.crc32(name.encode()):08x}{Path(name).suffix}")

    def _is_ours(self, path: str) -> bool:
        return path.startswith(f"{self._scratch}{os.sep}")

    def place_of(self, path: Any) -> Any:
        """Where `path` is: in the scratch folder if it was saved, or lies in a folder that was."""
        if not self._places:
            return path
        whole = os.path.abspath(path)
        for saved, place in self._places.items():
            if whole == saved or whole.startswith(f"{saved}{os.sep}"):
                return f"{place}{whole[len(saved) :]}"
        return path

    def _new_place(self, path: str) -> str:
        """For what is saved at `path`: a line of the script that saves again and again takes turns with few places."""
        if self._is_ours(path) or self.place_of(path) != path:
            return str(self.place_of(path))
        line = called_by(_LIBRARIES) or ""
        made = self._made.setdefault(line, [])
        if len(made) >= _COPIES:
            self._places.pop(made[-_COPIES], None)
        self._places[path] = self._named(f"{line} {len(made) % _COPIES}{Path(path).suffix}")
        made.append(path)
        return self._places[path]


def called_by(skipped: tuple[str, ...]) -> str | None:
    """The line that called the first of the `skipped` modules; None where an installed module or Python's own did."""
    frame: Any = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith(skipped):
        frame = frame.f_back
    file = frame.f_code.co_filename
    if file.startswith(_OF_PYTHON) or any(folder in file for folder in OF_LIBRARIES):
        return None
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
