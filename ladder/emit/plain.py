"""The files of an answer without DeepSpeed: for ladder, for accelerate, for the Trainer, and a launch script."""

from __future__ import annotations

from pathlib import Path

from ladder.emit.answer import Answer
from ladder.emit.files import OutputPaths
from ladder.emit.launch import launch_script, words_of_adapters
from ladder.emit.settings import settings_of
from ladder.units import format_bytes


def plain_output(output: Path) -> Path:
    """`best_plain.json` for best_config.json, and `NAME.plain.json` for other names."""
    config = OutputPaths.beside(output).config
    name = config.name.removesuffix(".json")
    stem = f"{name.removesuffix('config')}plain" if name.endswith("_config") else f"{name}.plain"
    return config.with_name(f"{stem}.json")


def plain_launch_script(answer: Answer, paths: OutputPaths) -> str:
    """A shell script that starts the user's training with `answer`."""
    return launch_script(answer, paths, _explanation(answer, paths))


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
