"""The answer in the words of other training programs: fragments to put into their own configuration files.

Keys are those of the programs' own schemas: axolotl's pydantic models, LLaMA-Factory's model and training arguments,
TRL's `accelerate_config`, Slurm's sbatch.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ladder.candidates import Export
from ladder.emit.accelerate import accelerate_config, to_yaml
from ladder.emit.config import SECTION
from ladder.emit.files import OutputPaths
from ladder.emit.settings import YOUR_MODEL, Settings, settings_in
from ladder.emit.trainer import CHECKPOINTING, trainer_arguments, trainer_command_line
from ladder.errors import UsageError
from ladder.text import shown
from ladder.units import GIB, format_bytes

_OF_CAUSAL_LMS = ("axolotl", "llama-factory", "trl")
_CHECKPOINTING_KWARGS = f"{CHECKPOINTING}_kwargs"
_LOADERS_OF_A_RANK = 4 * GIB
"""For a rank's data loaders, which the trials had none of."""


def exported(document: Mapping[str, Any], config: Path, target: str) -> str:
    """The text for `target`, a key of `EXPORTS`, from the content of the best_config.json at `config`.

    UsageError for a program that does not train such a model.
    """
    section = document[SECTION]
    task = section["workload"]["task"]
    if target in _OF_CAUSAL_LMS and task != "causal-lm":
        raise UsageError(f"--for {target}: it trains causal-lm models, and this answer is for {task}.")
    settings = settings_in(document)
    for said in _said(settings, target):
        if isinstance(said, str):
            raise UsageError(f"--for {target}: {said}.")
    return EXPORTS[target](document, config.absolute())


def _said(settings: Settings, target: str) -> list[Export | str]:
    """What the answer's techniques and its way of checkpointing say about an export for `target`."""
    way = settings.way_of_checkpointing
    return [*(technique.export(target) for technique in settings.techniques), *([way.export(target)] if way else [])]


def _apply(settings: Settings, target: str, fragment: dict[str, Any]) -> list[str]:
    """Change `fragment` as `_said`; returns comments."""
    notes = []
    for said in _said(settings, target):
        assert isinstance(said, Export)  # `exported` has refused the others
        for name, value in said.changes.items():
            fragment.pop(name, None)
            if value is not None:
                fragment[name] = value
        notes += [f"# {said.note}"] if said.note else []
    return notes


def making_accelerate(config: Path) -> str:
    """The command that writes the companion for accelerate beside `config`, which may have been copied without it."""
    accelerate = OutputPaths.beside(config).accelerate
    words = ["ladder", "export", str(config), "--for", "accelerate", "--output", str(accelerate)]
    return shlex.join(words)


def _trainer(document: Mapping[str, Any], config: Path) -> str:
    return json.dumps(trainer_arguments(settings_in(document), config), indent=2) + "\n"


def _accelerate(document: Mapping[str, Any], config: Path) -> str:
    settings = settings_in(document)
    return _lines(_warnings(settings)) + to_yaml(accelerate_config(settings, config))


def _deepspeed(document: Mapping[str, Any], config: Path) -> str:
    return json.dumps({key: value for key, value in document.items() if key != SECTION}, indent=2) + "\n"


def _axolotl(document: Mapping[str, Any], config: Path) -> str:
    settings = settings_in(document)
    arguments = trainer_arguments(settings, config, checkpointing=CHECKPOINTING)
    fragment = {
        "base_model": settings.model,
        "sequence_len": settings.seq_len,
        "micro_batch_size": settings.micro_batch,
        "eval_batch_size": settings.micro_batch,
        "gradient_accumulation_steps": settings.accumulation,
        CHECKPOINTING: settings.gradient_checkpointing,
        # Both: it takes bf16 where it is not told otherwise, and then drops fp16.
        "bf16": settings.dtype == "bf16",
        "fp16": settings.dtype == "fp16",
        "max_grad_norm": settings.gradient_clipping,
        "optimizer": arguments["optim"],
        "deepspeed": arguments["deepspeed"],
    }
    if settings.gradient_checkpointing:
        fragment[_CHECKPOINTING_KWARGS] = arguments[_CHECKPOINTING_KWARGS]
    _apply(settings, "axolotl", fragment)
    run = f"axolotl train your.yaml --launcher torchrun -- --nproc_per_node={settings.world_size}"
    return _with_comment(settings, run) + to_yaml(fragment)


def _llama_factory(document: Mapping[str, Any], config: Path) -> str:
    settings = settings_in(document)
    arguments = trainer_arguments(settings, config, checkpointing=CHECKPOINTING)
    # It switches checkpointing by a name of its own.
    for name in (CHECKPOINTING, _CHECKPOINTING_KWARGS):
        arguments.pop(name, None)
    fragment = {
        "model_name_or_path": settings.model,
        "finetuning_type": "full",
        "cutoff_len": settings.seq_len,
        **arguments,
        "disable_gradient_checkpointing": not settings.gradient_checkpointing,
    }
    if settings.gradient_checkpointing:
        fragment["use_reentrant_gc"] = False  # as it was measured
    notes = _apply(settings, "llama-factory", fragment)
    run = f"FORCE_TORCHRUN=1 NPROC_PER_NODE={settings.world_size} llamafactory-cli train your.yaml"
    return _with_comment(settings, run) + _lines(notes) + to_yaml(fragment)


def _trl(document: Mapping[str, Any], config: Path) -> str:
    settings = settings_in(document)
    arguments = trainer_arguments(settings, config, checkpointing=CHECKPOINTING)
    # accelerate brings the DeepSpeed configuration; the Trainer's own key would be a second one.
    del arguments["deepspeed"]
    accelerate = OutputPaths.beside(config).accelerate
    fragment = {
        "model_name_or_path": settings.model,
        "max_length": settings.seq_len,
        "accelerate_config": str(accelerate),
        **arguments,
    }
    missing = (
        "" if accelerate.exists() else f"# First make its accelerate_config:\n#   {shown(making_accelerate(config))}\n"
    )
    return _with_comment(settings, "trl sft --config your.yaml") + missing + to_yaml(fragment)


def _torchrun(document: Mapping[str, Any], config: Path) -> str:
    settings = settings_in(document)
    lines = [
        "#!/usr/bin/env bash",
        *_warnings(settings),
        "set -euo pipefail",
        *_exports(settings),
        _launch(settings, config),
    ]
    return _lines(lines)


def _sbatch(document: Mapping[str, Any], config: Path) -> str:
    settings = settings_in(document)
    cores = int(settings.environment["OMP_NUM_THREADS"]) * settings.world_size
    lines = [
        "#!/usr/bin/env bash",
        *_warnings(settings),
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=1",  # torchrun starts the ranks
        *([f"#SBATCH --gpus-per-node={settings.world_size}"] if settings.device == "cuda" else []),
        f"#SBATCH --cpus-per-task={cores}",
        *_host_memory(settings),
        "set -euo pipefail",
        *_exports(settings),
        f"srun --cpus-per-task={cores} {_launch(settings, config)}",  # which srun takes from nowhere else since 22.05
    ]
    return _lines(lines)


def _host_memory(settings: Settings) -> list[str]:
    """What the job asks for: it otherwise gets its partition's default, and its cgroup kills an offload.

    Nothing where the file does not say what was held: a guess could be less than that default.
    """
    held = settings.host_memory
    if held is None:
        return []
    asked = held + held // 10 + _LOADERS_OF_A_RANK * settings.world_size
    return [
        f"# Host memory: the ranks held {format_bytes(held)} when this was measured; asked for are a tenth more and",
        f"# {format_bytes(_LOADERS_OF_A_RANK)} a rank. Data loaders, and weights as they are loaded, may need more:",
        "# a --mem on the command line of sbatch wins over this one.",
        f"#SBATCH --mem={-(-asked // GIB)}G",
    ]


def _launch(settings: Settings, config: Path) -> str:
    arguments = trainer_command_line(trainer_arguments(settings, config))
    return f'torchrun --standalone --nproc_per_node {settings.world_size} "$@" {arguments}'


def _exports(settings: Settings) -> list[str]:
    return [f"export {name}={shlex.quote(value)}" for name, value in settings.environment.items()]


def _with_comment(settings: Settings, run: str) -> str:
    environment = " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.environment.items())
    yours = ""
    if settings.model == YOUR_MODEL:
        yours = (
            f"# Put the name of yours for `{YOUR_MODEL}`: {shown(settings.shape)} is a shape, with nothing to load.\n"
        )
    said = _lines(_warnings(settings))
    return f"# Written by ladder. Add your data and learning rate, then:\n#   {environment} {run}\n{said}{yours}"


def _warnings(settings: Settings) -> list[str]:
    """What the measurement does not hold for, as comments of a script or of YAML; that it was none, where simulated."""
    return [f"# Warning: {shown(warning)}." for warning in settings.warnings]


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


EXPORTS: Mapping[str, Callable[[Mapping[str, Any], Path], str]] = {
    "trainer": _trainer,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
    "axolotl": _axolotl,
    "llama-factory": _llama_factory,
    "trl": _trl,
    "torchrun": _torchrun,
    "sbatch": _sbatch,
}
