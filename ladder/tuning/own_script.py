"""The user's own script as the workload: what follows from a look at it, and what its trials are told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ladder.candidates import Candidate, Technique
from ladder.emit.settings import Settings
from ladder.emit.trainer import arguments_in_place
from ladder.errors import ModelNotAccessibleError, UsageError
from ladder.events.protocol import ScriptSpec
from ladder.launch.base import Deadlines
from ladder.launch.counting import counting
from ladder.machine.described import Machine
from ladder.machine.interpreter import version_of
from ladder.optimizers.registry import OPTIMIZERS
from ladder.options.tune import WorkloadOptions
from ladder.text import shown
from ladder.tuning.precision import dtype_of
from ladder.units import parameters_in_words
from ladder.workload.counted import Count
from ladder.workload.lora import Lora
from ladder.workload.script import KNOWN_OPTIONS, Script, ScriptFacts, keeps_its_optimizer, option_in, told
from ladder.workload.shapes import roughly_shaped, shape_from_config, with_adapters
from ladder.workload.workload import ModelShape, OptimizerName, Source, Task, Workload

_AGAIN = 3.0
"""A trial may take so many times the seconds that the look took. Chosen: several ranks read the same disk."""


def introduction(script: Script) -> list[str]:
    """What the look found, in sentences for the user."""
    facts = script.facts
    samples = "a stream" if facts.num_samples is None else f"{facts.num_samples:,} samples"
    kind = {"trainer": "with the Trainer", "accelerate": "in a loop with accelerate", "deepspeed": "with DeepSpeed"}
    part = facts.num_samples is None or facts.num_looked_at < facts.num_samples
    said = [
        f"It trains a {facts.model_class} ({parameters_in_words(facts.num_parameters)}) {kind[facts.kind]} on {samples}"
        f"{f' ({facts.num_looked_at:,} looked at)' if part else ''}: {facts.mean_tokens:,.0f} tokens on average, "
        f"{facts.longest:,} the longest. Its start took {facts.preparation_seconds:.1f} s; every trial repeats it."
    ]
    if facts.overrides:
        said.append(f"Trials replace {' and '.join(facts.overrides)}.")
    if facts.num_trainable < facts.num_parameters:
        way = "" if facts.lora is None else " by QLoRA" if facts.load_in == "4bit" else " by LoRA"
        way += ", with all that is not packed in fp32" if facts.prepare_kbit else ""
        said.append(f"Of these it trains {parameters_in_words(facts.num_trainable)}{way}.")
    if facts.generation is not None:
        number, longest = facts.generation.per_prompt, facts.generation.longest
        said.append(
            f"It generates {number} completions of up to {longest:,} tokens for a prompt. A sample is a completion "
            f"with its prompt, and tokens/s counts each completion as {longest:,} tokens."
        )
    return said


def shape_of(script: Script, count: Count | None = None) -> ModelShape:
    """The shape of the script's own model, with the parameters that it was seen to have. `count` as in
    `shape_from_config`. UsageError where its size is not known."""
    facts = script.facts
    config = facts.model_config_json
    path = str(config.get("_name_or_path") or "")
    source: Source = "file"
    if path:
        source = "folder" if Path(path).is_dir() else "hub"
    name = path or Path(facts.path).stem
    try:
        shape = shape_from_config(config, name=name, source=source, count=count)
        with suppress(UsageError):  # peft took them in the script, perhaps in another version
            shape = with_adapters(shape, Lora.from_peft(facts.lora) if facts.lora is not None else None, count)
        return _with_parameters(shape, facts)
    except ModelNotAccessibleError as error:
        # A class that trains no language has no count, but the look has counted its parameters.
        with suppress(ModelNotAccessibleError):
            rough = roughly_shaped(config, name=name, source=source, task=task_of(script))
            return _with_parameters(rough, facts)
        raise UsageError(f"The script cannot be tuned: the size of its model is not known ({error})") from None


def _with_parameters(shape: ModelShape, facts: ScriptFacts) -> ModelShape:
    own = facts.num_parameters - (facts.num_trainable if facts.lora is not None else 0)
    if facts.load_in is not None:  # packed weights have fewer elements than parameters
        own = shape.num_parameters
    scale = own / shape.num_parameters
    return replace(
        shape,
        num_parameters=own,
        num_matmul_parameters=round(shape.num_matmul_parameters * min(1.0, scale)),
        checkpoints=shape.checkpoints and facts.can_checkpoint,
        note="",
    )


def global_batch_of(script: Script, mapped: Mapping[str, str], world_size: int) -> int:
    """Sequences of an optimizer step of the script on `world_size` ranks, from its own settings."""

    def told(name: str, otherwise: int) -> int:
        text = option_in(script.command, mapped[name]) if name in mapped else None
        try:
            return otherwise if text is None else int(text)
        except ValueError:
            raise UsageError(f"--map {name}={mapped[name]}: {shown(text or '')} is not a number.") from None

    if not mapped:
        return script.facts.own_batch(world_size)
    return told("micro_batch", script.facts.micro_batch) * told("accumulation", script.facts.accumulation) * world_size


def mapping_of(words: Sequence[str]) -> dict[str, str]:
    """`micro_batch=--batch-size` and its like by what they name. UsageError for what is none."""
    found = {}
    for word in words:
        name, equals, option = word.partition("=")
        if name not in KNOWN_OPTIONS or not equals or not option.startswith("-"):
            raise UsageError(f"--map {shown(word)} is not NAME=--OPTION, with NAME one of {', '.join(KNOWN_OPTIONS)}.")
        found[name] = option
    return found


def task_of(script: Script) -> Task:
    """From the class of its model."""
    name = script.facts.model_class
    if "MaskedLM" in name:
        return "masked-lm"
    return "seq2seq-lm" if script.facts.model_config_json.get("is_encoder_decoder") else "causal-lm"


def workload_of_script(
    script: Script,
    options: WorkloadOptions,
    machine: Machine,
    note: Callable[[str], None],
) -> Workload:
    """What `script` trains on `machine`, with what the user asked for beside it; `note` is told of it."""
    world_size = machine.world_size
    for sentence in introduction(script):
        note(sentence)
    mapped = mapping_of(options.map)
    if script.facts.kind != "trainer":
        script = replace(script, facts=replace(script.facts, options=script.facts.options | mapped))
    if script.facts.load_in is not None and options.dtype == "fp32":
        raise UsageError("--dtype fp32: the script's quantised weights are computed with in 16 bits; leave it out.")
    batch = options.global_batch_size or global_batch_of(script, mapped, world_size)
    _require_whole_groups(script.facts, batch, world_size)
    return Workload(
        model=shape_of(script, counting(note)),
        task=task_of(script),
        seq_len=script.facts.longest,
        global_batch_size=batch,
        dtype=dtype_of(options.dtype or script.facts.precision, machine, note),
        optimizer=optimizer_in(script),
        gradient_clipping=script.facts.gradient_clipping,
        lora=Lora.from_peft(script.facts.lora) if script.facts.lora is not None else None,
        load_in=script.facts.load_in,
        prepare_kbit=script.facts.prepare_kbit,
        script=script,
    )


def _require_whole_groups(facts: ScriptFacts, batch: int, world_size: int) -> None:
    """UsageError where a generation of completions cannot be divided over prompts and ranks."""
    completions = facts.completions(batch, world_size)
    if completions is None or facts.generation is None:
        return
    per_prompt = facts.generation.per_prompt
    if completions % per_prompt or completions % world_size:
        raise UsageError(
            f"The script cannot be tuned: its {completions} completions at a time are no multiple of the {per_prompt} "
            f"of a prompt and of {world_size} ranks; change its batch, --global-batch-size or --gpus."
        )


def optimizer_in(script: Script) -> OptimizerName:
    """What its optimizer counts as in predictions."""
    name = script.facts.optimizer.lower()
    return next((known for known in OPTIMIZERS if known in name), Workload.optimizer)


def suits_script(technique: Technique, script: Script) -> bool:
    """Whether a script can be told of `technique` without a change to it."""
    if technique.shares_sequences or technique.first_differs:  # a script's micro-steps count as equal
        return False
    kind, optimizer = script.facts.kind, script.facts.optimizer
    if "optim" in technique.trainer_arguments() and keeps_its_optimizer(kind, optimizer):
        return False
    return script.facts.kind == "trainer" or technique.binds_cores or not technique.rank_module


def suiting(techniques: Sequence[Technique], script: Script) -> list[Technique]:
    """Those that `script` can be told of. UsageError for another one that the user allowed by name."""
    for technique in techniques:
        if not technique.consent.switch and not suits_script(technique, script):
            raise UsageError(
                f"{technique.consent.option(technique.name)} has no effect on this script, which cannot be told of "
                "it without a change to it; leave it out."
            )
    return [technique for technique in techniques if suits_script(technique, script)]


def script_spec(
    workload: Workload, candidate: Candidate, machine: Machine, deepspeed: Mapping[str, Any], folder: Path
) -> ScriptSpec | None:
    """What the ranks of a trial of `candidate` are told of the workload's script; None without one."""
    script = workload.script
    if script is None:
        return None
    accumulation = deepspeed["gradient_accumulation_steps"]
    return ScriptSpec(
        command=told(script.command, script.facts.options, candidate.micro_batch, accumulation),
        told=tuple(script.facts.options),
        scratch=str(folder.absolute() / "scratch"),
        arguments=script_arguments(workload, candidate, machine, deepspeed),
        facts=script.facts,
        planned=script.facts.planned(workload.global_batch_size, machine.world_size),
    )


def script_arguments(
    workload: Workload, candidate: Candidate, machine: Machine, deepspeed: Mapping[str, Any]
) -> dict[str, Any]:
    """TrainingArguments of a trial: those that the answer's files would have, with its own accumulation."""
    settings = Settings(
        model=workload.model.name,
        shape=workload.model.name,
        seq_len=workload.seq_len,
        dtype=workload.dtype,
        optimizer=None if workload.keeps_optimizer else workload.optimizer,
        gradient_clipping=workload.gradient_clipping,
        micro_batch=candidate.micro_batch,
        accumulation=deepspeed["gradient_accumulation_steps"],
        checkpoint_every=candidate.checkpoint_every,
        checkpointing=candidate.checkpointing,
        techniques=candidate.engine.techniques,
        world_size=machine.world_size,
        device=machine.device,
        rung=candidate.engine.rung,
        environment={},
        transformers=version_of("transformers"),
        host_memory=0,
        completions=workload.completions(machine.world_size),
        warnings=(),
    )
    return arguments_in_place(settings, deepspeed)


def with_preparation(deadlines: Deadlines, workload: Workload) -> Deadlines:
    """`deadlines` of a trial that runs a script up to its training first."""
    if workload.script is None:
        return deadlines
    seconds = 60.0 + _AGAIN * workload.script.facts.preparation_seconds
    return replace(deadlines, model=deadlines.model + seconds, total=deadlines.total + seconds)
