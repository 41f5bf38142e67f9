"""The launch script: the environment of the measurement, and `accelerate launch` with the emitted files."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from ladder.backends.registry import is_main
from ladder.candidates import Candidate, TrainerOnly
from ladder.emit.answer import Answer, OwnWords
from ladder.emit.binding import started
from ladder.emit.config import launch_environment
from ladder.emit.files import OutputPaths
from ladder.emit.nodes import finding, on_this_node, torchrun_options
from ladder.emit.settings import settings_of
from ladder.emit.trainer import least_transformers, trainer_arguments, trainer_command_line
from ladder.machine.interpreter import is_own, ranks_python
from ladder.optimizers.registry import OPTIMIZERS
from ladder.techniques.registry import WAYS_OF_CHECKPOINTING
from ladder.units import format_bytes
from ladder.workload.script import Script
from ladder.workload.workload import Workload, mixed_precision


def launch_script(answer: Answer, paths: OutputPaths, explanation: str | None = None) -> str:
    """A bash script that runs the user's training script, given as its arguments, as the answer was measured.

    Where that very script was tuned, it needs no arguments. `explanation` is None for an answer with DeepSpeed.
    """
    if answer.workload.script is not None:
        return own_script(answer, answer.workload.script, paths)
    exports = [f"export {name}={shlex.quote(value)}" for name, value in launch_environment(answer).items()]
    arguments = trainer_command_line(trainer_arguments(answer, paths.config, of_backend=False))
    if explanation is None:  # accelerate's file has what chooses another backend
        arguments = f'--deepspeed "$here"/{_quoted(paths.config.name)} {arguments}'
    binding, option, script = started(answer)
    lines = [
        "#!/usr/bin/env bash",
        *_comment(explanation or _explanation(answer, paths)),
        "set -euo pipefail",
        *binding,
        "",
        "# You can move this script if you move the other files with it.",
        'here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)',
        "trainer=()",
        'if [ "${1-}" = --trainer ]; then',
        "  shift",
        f"  trainer=({arguments})",
        "fi",
        "if [ $# -eq 0 ]; then",
        '  echo "usage: bash $0 [--trainer] train.py [its arguments]" >&2',
        "  exit 2",
        "fi",
        "",
        "# The environment of the trials. Without OMP_NUM_THREADS, launchers give every rank one thread, which makes",
        "# an optimizer on the CPU slow; without the allocator's settings, more memory is needed than was measured.",
        *exports,
        *finding(answer.num_nodes),
        "",
        f"exec {accelerate_start(answer, paths, option)} \\",
        f'  {script} ${{trainer[@]+"${{trainer[@]}}"}}',
    ]
    return "\n".join(lines) + "\n"


def own_script(answer: Answer, script: Script, paths: OutputPaths) -> str:
    """By torchrun, in the script's own words; or through `ladder run`, which gives it the answer's settings."""
    if answer.own_words is not None:
        return _in_own_words(answer, answer.own_words, paths)
    python = "" if is_own() else f" --python {shlex.quote(ranks_python())}"
    lines = [
        "#!/usr/bin/env bash",
        *_comment(f"{_headline(answer)}{_on_each_node(answer, paths, '')}"),
        "#",
        "# It starts the script that was tuned, unchanged; another command for it may follow the file's name.",
        "set -euo pipefail",
        'here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)',
        "if [ $# -eq 0 ]; then",
        f"  cd -- {_quoted(Path.cwd())}  # where it was tuned: paths in the command may be relative",
        f"  set -- {shlex.join(script.command)}",
        "fi",
        *finding(answer.num_nodes),
        *(['export MASTER_ADDR="$head" MASTER_PORT="$port"'] if answer.num_nodes > 1 else []),
        f'exec ladder run "$here"/{_quoted(paths.config.name)}{python} -- "$@"',
    ]
    return "\n".join(lines) + "\n"


def accelerate_start(answer: Answer, paths: OutputPaths, option: str = "") -> str:
    """The command by which accelerate starts the ranks, with an `option` more. On a CPU, its own would need MPI."""
    settings, node = settings_of(answer), on_this_node(answer.num_nodes)
    config, accelerate = (f'"$here"/{_quoted(path.name)}' for path in (paths.config, paths.accelerate))
    if is_main(answer.candidate.engine.rung):
        return f"{_program('accelerate')}{node}{option} --config_file {accelerate} --deepspeed_config_file {config}"
    if answer.device == "cpu":
        told = {
            "ACCELERATE_USE_CPU": "true",
            "ACCELERATE_MIXED_PRECISION": mixed_precision(answer.workload.dtype),
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": answer.candidate.accumulation,
        }
        exported = launch_environment(answer)
        words = " ".join(f"{name}={value}" for name, value in told.items() if name not in exported)
        return f"env {words} {_program('torchrun')} {torchrun_options(answer.world_size, answer.num_nodes)}{option}"
    options = settings.backend.launch_options(settings, str(paths.config))
    return f"{_program('accelerate')}{node} --config_file {accelerate} {options}{option}"


_MODULES = {
    "accelerate": "accelerate.commands.launch",
    "torchrun": "torch.distributed.run",
    "deepspeed": "deepspeed.launcher.runner",
}


def _program(name: str) -> str:
    """Launchers by their name, or as modules of an interpreter that is not ours."""
    if is_own():
        return f"{name} launch" if name == "accelerate" else name
    return f"{shlex.quote(ranks_python())} -m {_MODULES[name]}"


def _in_own_words(answer: Answer, own: OwnWords, paths: OutputPaths) -> str:
    folder = paths.config.parent
    files = {str(path): f'"$here"/{_quoted(path.name)}' for path in (paths.config, *own.files) if path.parent == folder}
    told = " ".join(_with_files(word, files) for word in own.words)
    start = {
        "torchrun": f"{_program('torchrun')} {torchrun_options(answer.world_size, answer.num_nodes)}",
        "deepspeed": f"{_program('deepspeed')} --num_gpus {answer.world_size}",
        "accelerate": accelerate_start(answer, paths),
    }
    lines = [
        "#!/usr/bin/env bash",
        *_comment(f"{_headline(answer)}{_on_each_node(answer, paths, '')}"),
        "#",
        "# It starts the script that was tuned, in its own words; more options may follow the file's name.",
        "# `ladder run` starts it too, and counts whether all steps are made.",
        "set -euo pipefail",
        'here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)',
        f"cd -- {_quoted(Path.cwd())}  # where it was tuned: paths in the command may be relative",
        "",
        *(f"export {name}={shlex.quote(value)}" for name, value in launch_environment(answer).items()),
        *finding(answer.num_nodes),
        f'exec {start[own.by]} {told} "$@"',
    ]
    return "\n".join(lines) + "\n"


def _with_files(word: str, files: Mapping[str, str]) -> str:
    """A word for the shell, where a file of the answer stands in it: beside this script."""
    option, equals, named = word.partition("=") if word.startswith("-") else ("", "", word)
    return f"{option}{equals}{files[named]}" if named in files else shlex.quote(word)


def _headline(answer: Answer) -> str:
    return f"""\
Written by ladder for {answer.workload.model.name} on {answer.world_size} × {answer.gpu_name or answer.device}:
{answer.candidate.key}, {answer.promised_speed}, peak {format_bytes(answer.measurement.peak_device)} \
of {format_bytes(answer.memory_limit)} per GPU.{_warnings(answer)}"""


def _explanation(answer: Answer, paths: OutputPaths) -> str:
    candidate = answer.candidate
    told = (technique.only_the_trainer(answer.world_size) for technique in candidate.engine.techniques)
    alone = next(filter(None, told), None)
    scripts = _with_any_script(answer, paths)
    if alone is not None:
        scripts = _with_the_trainer_alone(alone, answer, paths)
    return f"{_headline(answer)}\n\n{scripts}{_on_each_node(answer, paths)}"


def _on_each_node(answer: Answer, paths: OutputPaths, script: str = " train.py --its-own arguments") -> str:
    if answer.num_nodes == 1:
        return ""
    return f"""

Start it once on each of the {answer.num_nodes} nodes. In a Slurm job:
  srun --nodes={answer.num_nodes} --ntasks-per-node=1 bash {_quoted(paths.launch.name)}{script}
Elsewhere, set NODE_RANK (0 on the first) and MASTER_ADDR (the first's address) on each."""


def _with_any_script(answer: Answer, paths: OutputPaths) -> str:
    candidate = answer.candidate
    demands = _client_optimizer(answer) + _shards(candidate)
    return f"""\
A script that uses accelerate, with {_of_a_script(answer)}.
Its DataLoader must give batches of {candidate.micro_batch}: accelerate takes those, whatever the configuration says.
  bash {_quoted(paths.launch.name)} train.py --its-own arguments
{_accumulating(candidate)}Gradient checkpointing was {_checkpointing(candidate)}; no configuration file can set it, so \
the script must set it on its model.{_first_calls(answer)}{_on_cpu(answer)}

A script that uses the Hugging Face Trainer: --trainer adds the Trainer's arguments after its own. They are also in
{_quoted(paths.trainer.name)}, for HfArgumentParser.parse_json_file.{_least_transformers(answer)}
  bash {_quoted(paths.launch.name)} --trainer train.py --its-own arguments

A script that calls deepspeed.initialize(model=…, {_given(answer)}=…, config={str(paths.config)!r}):
run the exports below, then
  torchrun {torchrun_options(answer.world_size, answer.num_nodes)} train.py --its-own arguments{demands}"""


def _with_the_trainer_alone(alone: TrainerOnly, answer: Answer, paths: OutputPaths) -> str:
    """The explanation for an answer that only Trainer scripts can use."""
    on_cpu = ("On a CPU, first call deepspeed.init_distributed().",) if answer.device == "cpu" else ()
    demands = "\n".join(f"- {demand}" for demand in (*alone.demands, *on_cpu)) + words_of_adapters(answer.workload)
    return f"""\
{alone.sentence}
--trainer adds the Trainer's arguments after its script's own. They are also in
{_quoted(paths.trainer.name)}, for HfArgumentParser.parse_json_file.{_least_transformers(answer)}
  bash {_quoted(paths.launch.name)} --trainer train.py --its-own arguments
{demands}"""


def _least_transformers(answer: Answer) -> str:
    """What the Trainer's arguments need, which a JSON file cannot say."""
    least = least_transformers(answer)
    return f"\nThey need transformers {least} or later; tune again where an older one is installed." if least else ""


def _accumulating(candidate: Candidate) -> str:
    """How to accumulate with accelerate, which overrides DeepSpeed's setting: every micro-step would be a step."""
    if candidate.accumulation == 1:
        return ""
    return f"""\
Each of its micro-steps, loss, backward, step and zero_grad, goes inside `with accelerator.accumulate(model):`, so that
{candidate.accumulation} of them make an optimizer step.
"""


def _warnings(answer: Answer) -> str:
    """The answer's warnings; for a simulated answer, they say that it is simulated."""
    return "".join(f"\nWarning: {warning}." for warning in answer.warnings)


def _first_calls(answer: Answer) -> str:
    """Calls that a script without the Trainer's arguments must make itself; adapters are the script's in any case."""
    return words_of_adapters(answer.workload) + "".join(
        f"\nIt was measured with {technique.title}: before its model goes to DeepSpeed or accelerate, the script must"
        f"\ncall {call}."
        for technique in answer.candidate.engine.techniques
        if (call := technique.first_call())
    )


def words_of_adapters(workload: Workload) -> str:
    """What the script does to its model, so that no more of it is trained than was measured."""
    if workload.freeze:
        return f"\nIt was measured without training {', '.join(workload.freeze)}: the script must freeze them."
    if workload.lora is None:
        return ""
    arguments = ", ".join(f"{name}={value!r}" for name, value in workload.lora.for_peft().items())
    held = f", and its model must be loaded in {workload.load_in}" if workload.load_in is not None else ""
    prepared = "peft.prepare_model_for_kbit_training(model) and " if workload.prepare_kbit else ""
    return (
        f"\nIt was measured with adapters{held}: before its model goes to the Trainer, DeepSpeed or\naccelerate, the "
        f"script must call {prepared}peft.get_peft_model(model, peft.LoraConfig({arguments}))."
    )


def _on_cpu(answer: Answer) -> str:
    """What an accelerate script needs on a CPU; the Trainer has `use_cpu` for it."""
    if answer.device != "cpu" or answer.world_size == 1:
        return ""
    return """
On a CPU it must call accelerate.PartialState(cpu=True) before Accelerator(): otherwise accelerate treats every rank \
as the only one and gives all of them the same data."""


def _optimizer(answer: Answer) -> str:
    name = answer.workload.optimizer
    special = (technique.optimizer(name) for technique in answer.candidate.engine.techniques)
    return next(filter(None, special), OPTIMIZERS[name].in_torch)


def _of_a_script(answer: Answer) -> str:
    if answer.learning_rate is None:
        return f"{_optimizer(answer)} and no DummyOptim"
    return f"accelerate.utils.DummyOptim(…, lr={answer.learning_rate:g})"


def _given(answer: Answer) -> str:
    return "optimizer" if answer.learning_rate is None else "model_parameters"


def _client_optimizer(answer: Answer) -> str:
    """The optimizer that DeepSpeed needs from a script; the Trainer and accelerate handle it themselves."""
    if answer.learning_rate is not None:
        return "\nThe configuration has its optimizer."
    on_host = OPTIMIZERS[answer.workload.optimizer].on_host
    if answer.candidate.engine.rung.offload_optimizer == "none" or not on_host:
        return f"\nIts optimizer is {_optimizer(answer)}, as it was measured."
    return f"""
With its optimizer offloaded it must be {on_host}; \
DeepSpeed refuses a torch optimizer here."""


def _shards(candidate: Candidate) -> str:
    """What HfDeepSpeedConfig needs before `from_pretrained`; the Trainer and accelerate handle it themselves."""
    if candidate.engine.rung.stage < 3:
        return ""
    return """
If transformers builds its model in shards (HfDeepSpeedConfig), call deepspeed.init_distributed() before that."""


def _comment(text: str) -> list[str]:
    """Every line of `text` as a comment, also after a line break in a name or a path."""
    return [f"# {line}".rstrip() for line in text.split("\n")]


def _quoted(path: object) -> str:
    return shlex.quote(str(path))


def _checkpointing(candidate: Candidate) -> str:
    way = WAYS_OF_CHECKPOINTING.get(candidate.checkpointing)
    return candidate.checkpointing if way is None else way.in_words
