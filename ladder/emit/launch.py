"""launch.sh: the environment of the measurement, and `accelerate launch` with the emitted files."""

from __future__ import annotations

import shlex

from ladder.candidates import Candidate, TrainerOnly
from ladder.emit.answer import Answer
from ladder.emit.config import launch_environment
from ladder.emit.files import OutputPaths
from ladder.emit.trainer import trainer_arguments, trainer_command_line
from ladder.techniques.registry import WAYS_OF_CHECKPOINTING
from ladder.units import format_bytes

# Without `fused` the step makes copies of what it updates, up to twice its bytes, which the trials' did not.
_OPTIMIZERS = {
    "adamw": "torch.optim.AdamW(…, fused=True)",
    "adam": "torch.optim.Adam(…, fused=True)",
    "sgd": "torch.optim.SGD(…)",
}


def launch_script(answer: Answer, paths: OutputPaths) -> str:
    """A bash script that runs the user's training script, given as its arguments, as the answer was measured."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in launch_environment(answer).items()]
    config, accelerate = (f'"$here"/{_quoted(path.name)}' for path in (paths.config, paths.accelerate))
    arguments = trainer_arguments(answer, paths.config)
    del arguments["deepspeed"]
    lines = [
        "#!/usr/bin/env bash",
        *_comment(_explanation(answer, paths)),
        "set -euo pipefail",
        "",
        "# The files beside this one are found wherever they are moved together.",
        'here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)',
        "trainer=()",
        'if [ "${1-}" = --trainer ]; then',
        "  shift",
        f"  trainer=(--deepspeed {config} {trainer_command_line(arguments)})",
        "fi",
        "if [ $# -eq 0 ]; then",
        '  echo "usage: bash $0 [--trainer] train.py [its arguments]" >&2',
        "  exit 2",
        "fi",
        "",
        "# As in the trials. Without a thread count the launchers give every rank one, which starves an optimizer on",
        "# the CPU; without what torch's allocator is told here, more memory is needed than was measured.",
        *exports,
        "",
        f"exec accelerate launch --config_file {accelerate} --deepspeed_config_file {config} \\",
        '  "$@" ${trainer[@]+"${trainer[@]}"}',
    ]
    return "\n".join(lines) + "\n"


def _explanation(answer: Answer, paths: OutputPaths) -> str:
    candidate = answer.candidate
    told = (technique.only_the_trainer(answer.world_size) for technique in candidate.engine.techniques)
    alone = next(filter(None, told), None)
    scripts = _with_any_script(answer, paths)
    if alone is not None:
        scripts = _with_the_trainer_alone(alone, answer, paths)
    return f"""\
Written by ladder for {answer.workload.model.name} on {answer.world_size} × {answer.gpu_name or answer.device}:
{candidate.key}, {answer.tokens_per_second:,.0f} tokens/s, peak {format_bytes(answer.measurement.peak_device)} of \
{format_bytes(answer.memory_limit)} per GPU.{_warnings(answer)}

{scripts}"""


def _with_any_script(answer: Answer, paths: OutputPaths) -> str:
    candidate, ranks = answer.candidate, answer.world_size
    demands = _client_optimizer(answer) + _shards(candidate)
    return f"""\
A script that uses accelerate, with {_optimizer(answer)} and no DummyOptim:
  bash {_quoted(paths.launch.name)} train.py --its-own arguments
{_accumulating(candidate)}Gradient checkpointing was {_checkpointing(candidate)}; no configuration file can switch it, \
so such a script sets it on its model.{_first_calls(answer)}{_on_cpu(answer)}

A script that uses the Hugging Face Trainer: --trainer adds the Trainer's arguments after its own. They are also in
{_quoted(paths.trainer.name)}, for HfArgumentParser.parse_json_file.
  bash {_quoted(paths.launch.name)} --trainer train.py --its-own arguments

A script that calls deepspeed.initialize(model=…, optimizer=…, config={str(paths.config)!r}):
the exports below, then
  torchrun --standalone --nproc_per_node {ranks} train.py --its-own arguments{demands}"""


def _with_the_trainer_alone(alone: TrainerOnly, answer: Answer, paths: OutputPaths) -> str:
    """Where any other script would have half of the work to do itself."""
    on_cpu = ("On a CPU it first calls deepspeed.init_distributed().",) if answer.device == "cpu" else ()
    demands = "\n".join(f"- {demand}" for demand in (*alone.demands, *on_cpu))
    return f"""\
{alone.sentence}
--trainer adds the Trainer's arguments after its script's own. They are also in
{_quoted(paths.trainer.name)}, for HfArgumentParser.parse_json_file.
  bash {_quoted(paths.launch.name)} --trainer train.py --its-own arguments
{demands}"""


def _accumulating(candidate: Candidate) -> str:
    """What else makes every micro-step an optimizer step: accelerate overrules DeepSpeed's count of them."""
    if candidate.accumulation == 1:
        return ""
    return f"""\
Each of its micro-steps, loss, backward, step and zero_grad, goes inside `with accelerator.accumulate(model):`, so that
{candidate.accumulation} of them make an optimizer step.
"""


def _warnings(answer: Answer) -> str:
    """What the measurement does not hold for; that it was none, where it was simulated."""
    return "".join(f"\nWarning: {warning}." for warning in answer.warnings)


def _first_calls(answer: Answer) -> str:
    """What only the Trainer's arguments do by themselves."""
    return "".join(
        f"\nIt was measured on {technique.title}: before its model goes to DeepSpeed or accelerate, such a script calls"
        f"\n{call}."
        for technique in answer.candidate.engine.techniques
        if (call := technique.first_call())
    )


def _on_cpu(answer: Answer) -> str:
    """What no file can say for an accelerate script; the Trainer's `use_cpu` says it."""
    if answer.device != "cpu" or answer.world_size == 1:
        return ""
    return """
On a CPU it must call accelerate.PartialState(cpu=True) before Accelerator(): accelerate otherwise takes every rank \
for the only one and gives all of them the same data."""


def _optimizer(answer: Answer) -> str:
    name = answer.workload.optimizer
    special = (technique.optimizer(name) for technique in answer.candidate.engine.techniques)
    return next(filter(None, special), _OPTIMIZERS[name])


def _client_optimizer(answer: Answer) -> str:
    """What DeepSpeed itself demands of a script's optimizer; the Trainer and accelerate see to it on their own."""
    if answer.candidate.engine.rung.offload_optimizer == "none" or answer.workload.optimizer == "sgd":
        return f"\nIts optimizer is {_optimizer(answer)}, as it was measured."
    adamw_mode = answer.workload.optimizer == "adamw"
    return f"""
With its optimizer offloaded it must be deepspeed.ops.adam.DeepSpeedCPUAdam(…, adamw_mode={adamw_mode}); \
DeepSpeed refuses a torch optimizer here."""


def _shards(candidate: Candidate) -> str:
    """What HfDeepSpeedConfig needs before `from_pretrained`; the Trainer and accelerate see to it on their own."""
    if candidate.engine.rung.stage < 3:
        return ""
    return """
Where transformers builds its model in shards (HfDeepSpeedConfig), deepspeed.init_distributed() comes before that."""


def _comment(text: str) -> list[str]:
    """Every line of `text` behind a #, also those that come from a line break in a name or a path."""
    return [f"# {line}".rstrip() for line in text.split("\n")]


def _quoted(path: object) -> str:
    return shlex.quote(str(path))


def _checkpointing(candidate: Candidate) -> str:
    way = WAYS_OF_CHECKPOINTING.get(candidate.checkpointing)
    return candidate.checkpointing if way is None else way.in_words
