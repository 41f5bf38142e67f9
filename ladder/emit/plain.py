"""The files of an answer without DeepSpeed: for ladder, for accelerate, for the Trainer, and a launch script."""

from __future__ import annotations

import shlex
from pathlib import Path

from ladder.emit.answer import Answer
from ladder.emit.binding import started
from ladder.emit.config import launch_environment
from ladder.emit.files import OutputPaths
from ladder.emit.launch import accelerate_start, own_script, words_of_adapters
from ladder.emit.nodes import finding
from ladder.emit.settings import settings_of
from ladder.emit.trainer import trainer_arguments, trainer_command_line
from ladder.units import format_bytes


def plain_output(output: Path) -> Path:
    """`best_plain.json` for best_config.json, and `NAME.plain.json` for other names."""
    config = OutputPaths.beside(output).config
    name = config.name.removesuffix(".json")
    stem = f"{name.removesuffix('config')}plain" if name.endswith("_config") else f"{name}.plain"
    return config.with_name(f"{stem}.json")


def plain_launch_script(answer: Answer, paths: OutputPaths) -> str:
    """A shell script that starts the user's training with `answer`."""
    if answer.workload.script is not None:
        return own_script(answer, answer.workload.script, paths)
    exports = [f"export {name}={shlex.quote(value)}" for name, value in launch_environment(answer).items()]
    arguments = trainer_arguments(answer, paths.config, of_backend=False)  # which the file for accelerate has
    binding, option, script = started(answer)
    lines = [
        "#!/usr/bin/env bash",
        *(f"# {line}".rstrip() for line in _explanation(answer, paths).split("\n")),
        "set -euo pipefail",
        *binding,
        'here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)',
        "trainer=()",
        'if [ "${1-}" = --trainer ]; then',
        "  shift",
        f"  trainer=({trainer_command_line(arguments)})",
        "fi",
        "if [ $# -eq 0 ]; then",
        '  echo "usage: bash $0 [--trainer] train.py [its arguments]" >&2',
        "  exit 2",
        "fi",
        *exports,
        *finding(answer.num_nodes),
        f"exec {accelerate_start(answer, paths, option)} \\",
        f'  {script} ${{trainer[@]+"${{trainer[@]}}"}}',
    ]
    return "\n".join(lines) + "\n"


def _explanation(answer: Answer, paths: OutputPaths) -> str:
    candidate, workload, settings = answer.candidate, answer.workload, settings_of(answer)
    weights, more = settings.backend.about_weights(settings)
    calls = "".join(
        f"\nWithout the Trainer, the script must call {call} before its model goes to accelerate."
        for technique in candidate.engine.techniques
        if (call := technique.first_call())
    )
    warned = "".join(f"\nWarning: {warning}." for warning in answer.warnings)
    return f"""\
Written by ladder for {workload.model.name} on {answer.world_size} × {answer.gpu_name or answer.device}, without \
DeepSpeed:
{candidate.key}, {answer.promised_speed}, peak {format_bytes(answer.measurement.peak_device)} \
of {format_bytes(answer.memory_limit)} per GPU.{warned}

{weights}A Trainer script:                 bash {paths.launch.name} --trainer train.py --its-own arguments
A script that uses accelerate:    bash {paths.launch.name} train.py --its-own arguments
with micro-batches of {candidate.micro_batch} in a DataLoader of its own, {workload.optimizer}, and each micro-step in \
`with accelerator.accumulate(model):`.{words_of_adapters(workload)}{more}{calls}"""
