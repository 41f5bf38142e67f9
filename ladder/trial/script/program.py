"""Which Python program a command runs, and running it in this process."""

from __future__ import annotations

import io
import json
import os
import runpy
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field, replace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from ladder.errors import UsageError
from ladder.text import shown


@dataclass(frozen=True)
class Program:
    """A Python file or module, with its arguments."""

    name: str
    """A path, or what follows `-m`."""
    is_module: bool
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in which its launcher would tell accelerate of the training."""
    is_plain: bool = True
    """Its launcher would choose neither DeepSpeed nor FSDP for it."""
    local_rank: str = ""
    """The option by which its launcher tells each process its number on the node; empty for none."""

    @property
    def file(self) -> Path:
        """Its source. UsageError for a module that is not installed."""
        if not self.is_module:
            return Path(self.name)
        found = _spec_of(self.name)
        if found is not None and found.submodule_search_locations:  # `-m package` runs its __main__
            found = _spec_of(f"{self.name}.__main__")
        if found is None or found.origin is None:
            raise UsageError(f"There is no module {shown(self.name)} in this environment; install its package.")
        return Path(found.origin)

    @property
    def words(self) -> tuple[str, ...]:
        """What a launcher starts, without arguments."""
        return ("-m", self.name) if self.is_module else (self.name,)

    @property
    def launcher(self) -> Literal["torchrun", "deepspeed", "other"]:
        """What has to start it."""
        if not self.local_rank:
            return "torchrun"
        return "deepspeed" if self.local_rank == _OF_DEEPSPEED else "other"

    def run(self) -> None:
        """As `python NAME ARGUMENTS` would, in this process."""
        number = [f"{self.local_rank}={os.environ['LOCAL_RANK']}"] if self.local_rank else []
        sys.argv = [self.name, *number, *self.arguments]
        if self.is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(self.name).resolve().parent))
            runpy.run_path(self.name, run_name="__main__")


def _spec_of(module: str) -> ModuleSpec | None:
    try:
        return find_spec(module)
    except ModuleNotFoundError as error:  # of a package that it would be in, or that this one imports
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        return None


_OF_DEEPSPEED = "--local_rank"
_LLAMA_FACTORY = ("llamafactory-cli", "lmf")


def program_of(command: Sequence[str]) -> Program:
    """The program that `command` runs, without the launcher before it: ladder starts the ranks itself.

    UsageError for what is not Python.
    """
    words = list(command)
    name = Path(words[0]).name if words else ""
    if name in ("python", "python3") or (name.startswith("python3.") and name[8:].isdigit()):
        words = _without_flags(words[1:])
        name = Path(words[0]).name if words else ""
    if name == "torchrun" or words[:2] == ["-m", "torch.distributed.run"]:
        return _launched("torchrun", words[2:] if words[0] == "-m" else words[1:])
    if words[:2] == ["-m", "accelerate.commands.launch"] or (name == "accelerate" and words[1:2] == ["launch"]):
        return _launched("accelerate launch", words[2:])
    if name == "deepspeed":
        return _launched("deepspeed", words[1:])
    if words[:2] == ["-m", "torch.distributed.launch"]:
        return _launched("torch.distributed.launch", words[2:])
    if name == "trl" and len(words) > 1 and _spec_of(f"trl.scripts.{words[1]}"):  # which starts accelerate's launcher
        return Program(f"trl.scripts.{words[1]}", True, tuple(words[2:]))
    if name in _LLAMA_FACTORY and words[1:2] == ["train"]:  # which starts torchrun where it sees several GPUs
        return Program("llamafactory.launcher", True, tuple(words[2:]))
    if words[:1] == ["-m"] and len(words) > 1:
        return Program(words[1], True, tuple(words[2:]))
    if not words:
        raise UsageError("No script was named after --; give one, such as: ladder tune -- train.py --epochs 1.")
    return Program(_python_file(words[0]), False, tuple(words[1:]))


def _without_flags(words: list[str]) -> list[str]:
    """Without the interpreter's own options, such as `-u` and `-X utf8`, which are for a process of its own."""
    while words and words[0].startswith("-") and words[0] != "-m":
        words = words[2 if words[0] in ("-X", "-W") else 1 :]
    return words


def _python_file(name: str) -> str:
    if Path(name).suffix == ".py":
        if not Path(name).is_file():
            raise UsageError(f"There is no script {shown(name)} here; give its path.")
        return name
    found = name if Path(name).is_file() else shutil.which(name)
    if found is None:
        raise UsageError(f"{shown(name)} is neither a Python file nor an installed program; give the script's path.")
    with open(found, "rb") as file:
        first = file.readline(200)
    if not first.startswith(b"#!") or b"python" not in first:
        raise UsageError(
            f"{shown(name)} is not a Python program, and only the Python process that trains can be tuned; "
            "give the command that it runs."
        )
    return found


def _launched(launcher: str, words: list[str]) -> Program:
    """What `launcher` would start, as its own parser reads `words`. UsageError for what that refuses."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            program = _PARSERS[launcher](words)
    except SystemExit:
        error = (said.getvalue().strip().splitlines() or [""])[-1].partition("error: ")[2] or "no script is named"
        raise UsageError(f"{launcher} does not understand the command: {shown(error)}.") from None
    return program if program.is_module else replace(program, name=_python_file(program.name))


def _of_accelerate(words: list[str]) -> Program:
    from accelerate.commands.launch import launch_command_parser

    known = launch_command_parser().parse_args(words)
    precision, accumulation, is_plain = _in_file_of_accelerate(known.config_file)
    if known.use_deepspeed:  # without it accelerate does not pass this on
        accumulation = known.gradient_accumulation_steps or accumulation
    if known.deepspeed_config_file is not None:
        own_precision, own_accumulation = _in_file_of_deepspeed(known.deepspeed_config_file)
        precision, accumulation = own_precision or precision, own_accumulation or accumulation
    told = {
        "ACCELERATE_MIXED_PRECISION": known.mixed_precision or precision,
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": accumulation,
    }
    given = {name: str(value) for name, value in told.items() if value is not None}
    is_plain = is_plain and not (known.use_deepspeed or known.use_fsdp or known.use_megatron_lm)
    return Program(known.training_script, bool(known.module), tuple(known.training_script_args), given, is_plain)


def _in_file_of_accelerate(path: str | None) -> tuple[str | None, int | None, bool]:
    """Precision and accumulation in accelerate's configuration file: the given one, else the user's, if there is one.

    The rest of it is about ranks and engines, which trials decide. Also whether it chooses neither DeepSpeed nor FSDP.
    """
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file

    if path is None and not Path(default_config_file).is_file():
        return None, None, True
    if path is not None and not Path(path).is_file():
        raise UsageError(f"There is no accelerate configuration {shown(path)} here; give its path.")
    config = load_config_from_file(path)
    own = getattr(config, "deepspeed_config", None) or {}
    is_plain = str(getattr(config.distributed_type, "value", config.distributed_type)) in _PLAIN_TYPES
    if "deepspeed_config_file" in own:
        return *_in_file_of_deepspeed(own["deepspeed_config_file"]), is_plain
    accumulation = own.get("gradient_accumulation_steps")
    return config.mixed_precision, accumulation if isinstance(accumulation, int) else None, is_plain


_PLAIN_TYPES = ("NO", "MULTI_GPU", "MULTI_CPU")
"""accelerate's words for training without an engine."""


def _in_file_of_deepspeed(path: str) -> tuple[str | None, int | None]:
    """Precision and accumulation where it names them; `auto` leaves them to the script."""
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UsageError(f"The DeepSpeed configuration {shown(path)} cannot be read; give a JSON file.") from None
    precisions = [name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled") is True]
    accumulation = config.get("gradient_accumulation_steps")
    return next(iter(precisions), None), accumulation if isinstance(accumulation, int) else None


def _of_torchrun(words: list[str]) -> Program:
    from torch.distributed.run import get_args_parser

    known = get_args_parser().parse_args(words)
    return Program(known.training_script, known.module, tuple(known.training_script_args))


def _of_its_forerunner(words: list[str]) -> Program:
    from torch.distributed.launch import parse_args

    known = parse_args(words)
    local_rank = "" if known.use_env else "--local-rank"
    return Program(known.training_script, known.module, tuple(known.training_script_args), local_rank=local_rank)


def _of_deepspeed(words: list[str]) -> Program:
    from deepspeed.launcher.runner import parse_args

    known = parse_args(words)
    local_rank = "" if known.no_local_rank else _OF_DEEPSPEED
    return Program(known.user_script, known.module, tuple(known.user_args), local_rank=local_rank)


_PARSERS = {
    "accelerate launch": _of_accelerate,
    "torchrun": _of_torchrun,
    "torch.distributed.launch": _of_its_forerunner,
    "deepspeed": _of_deepspeed,
}
