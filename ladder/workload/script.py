"""The user's own training script: what a look at it found, and the command that starts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ladder.optimizers.registry import OPTIMIZERS

ScriptKind = Literal["trainer", "accelerate", "deepspeed"]
"""What a script trains with: the Trainer of transformers, or a loop of its own with accelerate or DeepSpeed."""
KNOWN_OPTIONS = {"micro_batch": "per_device_train_batch_size", "accumulation": "gradient_accumulation_steps"}
"""By what they set: as TrainingArguments calls them, and scripts that follow it in their options or files."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How a trainer writes what it trains on, as the script sets it."""

    batch: int | None
    """Completions of one generation, of all ranks; None where the script does not say."""
    micro_steps: int | None
    """Micro-steps that train on one generation; None where the script does not say."""
    per_prompt: int
    """Completions of a prompt, which are compared with each other."""
    longest: int
    """Tokens of a completion at most."""
    iterations: int = 1
    """How often each completion is trained on."""


@dataclass(frozen=True, kw_only=True)
class OwnTraining:
    """What a script would make by itself on the ranks of the tune; None for what it does not say."""

    micro_batch: int
    accumulation: int
    optimizer_steps: int | None
    schedule_steps: int | None
    """Of its learning rate, as the schedule counts them."""
    samples: int | None
    """Of its data; None for a stream."""
    trainable: int
    """Parameters."""


@dataclass(frozen=True)
class OwnEngine:
    """What a script trains on as its command stands: torch's DDP, FSDP2, or DeepSpeed at a `stage`."""

    stage: int | None = None
    """Of ZeRO, or what FSDP2 divides of it; None with DDP."""
    offload_optimizer: str = "none"
    offload_param: str = "none"
    checkpointing: bool = False
    """Of all layers."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """The Trainer's that change its kernels."""
    fsdp2: bool = False


@dataclass(frozen=True, kw_only=True)
class CountedOptimizer:
    """What a script's own optimizer keeps and computes for each element that it trains."""

    states: float
    """Bytes of its states where the weights have 32 bits, as DeepSpeed's masters have."""
    states_of_16_bits: float
    """The same where the weights have 16."""
    products: float
    """Operations of matrix products in its step, as Muon's."""
    by_shape: bool
    """What it does depends on a parameter's shape, which ZeRO's flat parts have lost."""


_OF_16_BITS: dict[str, Literal["bf16", "fp16"]] = {"bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, kw_only=True)
class ScriptFacts:
    """What a look at a script found, right before it would have begun to train."""

    kind: ScriptKind
    path: str = ""
    """Of the program's file."""
    digest: str = ""
    """SHA-256 of that file."""
    model_config_json: dict[str, Any]
    model_class: str
    num_parameters: int
    num_trainable: int
    micro_batch: int
    """Of the script's own settings, as the accumulation, the dtype and all below."""
    accumulation: int
    dtype: Literal["bf16", "fp16", "fp32"]
    optimizer: str
    """As transformers names it, or the class of the script's own."""
    counted: CountedOptimizer | None = None
    """None where the look could not make it step; it counts as `workload.Workload.optimizer` then."""
    gradient_clipping: float
    longest: int
    """Tokens of the longest sequence, as the model gets it."""
    rows: int
    """Sequences that the model gets of one sample: two where a pair is compared."""
    global_batch: int | None = None
    """Of an optimizer step on all ranks, where a DeepSpeed file says that in place of the accumulation."""
    mean_tokens: float
    """Of a sample, without padding."""
    num_samples: int | None
    """None for a stream."""
    num_looked_at: int
    evaluates: bool = False
    checkpoints: bool = False
    """It saves so that it can resume."""
    overrides: tuple[str, ...] = ()
    """What it says itself and the trial decides, in words."""
    planned_steps: int | None = None
    """Optimizer steps that it would make by itself on the ranks of the tune; None where it does not say."""
    schedule_steps: int | None = None
    """Steps of its learning rate's schedule; None where that is not known."""
    weights: str = ""
    """The type of most of what it trains, as torch names it."""
    held: str = ""
    """The type of most of its model's weights that are not packed."""
    lora: dict[str, Any] | None = None
    """The arguments of peft's LoraConfig, where it trains such adapters."""
    load_in: Literal["4bit", "8bit"] | None = None
    """How its linear layers are held if they are quantised."""
    prepare_kbit: bool = False
    """All its other frozen weights are then in fp32."""
    can_checkpoint: bool = True
    """Its model can be told to checkpoint its layers."""
    trains_16_bits: bool = False
    """Some of what it trains has 16 bits, of which DeepSpeed makes fp32 masters."""
    engine: OwnEngine | None = None
    """None for one that ladder has no rung for, such as the first FSDP."""
    uses_cpu: bool = False
    """It tells its Trainer to."""
    generation: Generation | None = None
    """Of a trainer that writes what it trains on, as TRL's GRPO."""
    program: tuple[str, ...] = ()
    """What a launcher starts, without arguments."""
    launcher: Literal["torchrun", "deepspeed", "other"] = "torchrun"
    """What has to start it: another than torchrun where each process gets its number as an option."""
    takes_options: bool = False
    """Its parser of arguments has the options of the Trainer."""
    numbers: dict[str, int] = field(default_factory=dict)
    """Options of its parser whose values are its micro-batch or its accumulation."""
    num_arguments: int = 0
    """Of the program: so many last words of the command."""
    modules: tuple[str, ...] = ()
    """Installed modules that it imports."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Of its samples, by index, where each had to be read for its own: trials need not read them again."""
    operators: tuple[str, ...] = ()
    """Of DeepSpeed, which its own optimizer needs."""
    options: dict[str, str] = field(default_factory=dict)
    """Those of a loop's own that set its `micro_batch` and `accumulation`, by these names."""
    preparation_seconds: float = 0.0
    """From its start to the beginning of training: imports, data set, weights."""

    @property
    def precision(self) -> Literal["bf16", "fp16", "fp32"]:
        """In which it computes: under autocast or DeepSpeed, or with weights that have 16 bits."""
        if self.dtype != "fp32":
            return self.dtype
        return _OF_16_BITS.get(self.held, "fp32" if self.load_in is None else "bf16")

    def own_batch(self, world_size: int) -> int:
        """Sequences of an optimizer step on `world_size` ranks, by the script's own settings."""
        return self.global_batch or self.micro_batch * self.accumulation * world_size

    def planned(self, global_batch: int, world_size: int) -> OwnTraining | None:
        """What a training at `global_batch` has to equal; None at another one than the script's own, which is meant to
        differ, and where it does not say its own."""
        if global_batch != self.own_batch(world_size):
            return None
        return OwnTraining(
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            optimizer_steps=self.planned_steps,
            schedule_steps=self.schedule_steps,
            samples=self.num_samples,
            trainable=self.num_trainable,
        )

    def completions(self, global_batch: int, world_size: int) -> int | None:
        """Of one generation on all ranks; None for a training that generates nothing.

        Where the script sets none, one generation is trained on in one optimizer step, as in TRL.
        """
        generation = self.generation
        if generation is None or generation.batch is not None:
            return generation.batch if generation is not None else None
        if generation.micro_steps is not None:
            return generation.micro_steps * self.micro_batch * world_size
        return global_batch


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script as part of a workload."""

    command: tuple[str, ...]
    """As it was typed."""
    facts: ScriptFacts

    @property
    def identity(self) -> Mapping[str, Any]:
        """What changes whenever it trains something else. Times, which differ from look to look, are no part of it."""
        facts = self.facts
        generation = {} if facts.generation is None else {"generation": asdict(facts.generation)}
        return {
            **generation,
            "command": list(self.command),
            "kind": facts.kind,
            "sha256": facts.digest,
            "parameters": facts.num_parameters,
            "samples": facts.num_samples,
            "rows": facts.rows,
        }

    def as_dict(self) -> dict[str, Any]:
        """As JSON can hold it, without what only the next trial needs."""
        left_out = ("modules", "model_config_json", "sizes")
        facts = {name: value for name, value in asdict(self.facts).items() if name not in left_out}
        lists = {name: list(facts[name]) for name in ("overrides", "operators", "program")}
        return {"command": list(self.command), "facts": facts | lists}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Script:
        """The script that `as_dict` was called on, but for what that leaves out."""
        told = dict(values["facts"])
        tuples = {name: tuple(told.get(name, ())) for name in ("overrides", "operators", "program")}
        parts: dict[str, type] = {"generation": Generation, "engine": OwnEngine, "counted": CountedOptimizer}
        made = {name: part(**told[name]) if told.get(name) else None for name, part in parts.items()}
        facts = ScriptFacts(**told | tuples | made, model_config_json={})
        return cls(command=tuple(values["command"]), facts=facts)


_OUTPUT_OPTIONS = ("--output_dir", "--output-dir", "--save_dir", "--save-dir")


def keeps_its_optimizer(kind: str, optimizer: str) -> bool:
    """Whether a script's optimizer of this name is told to no Trainer, but stays as the script makes it."""
    return kind == "trainer" and all(optimizer not in each.trainer_names for each in OPTIMIZERS.values())


def can_be_offloaded(facts: ScriptFacts) -> bool:
    """Whether the script's optimizer stays what it is with its states on the host.

    accelerate 1.15 puts DeepSpeed's Adam for the CPU in the place of any, without a word and without decoupled weight
    decay if it is not torch's AdamW (`map_pytorch_optim_to_deepspeed`); it leaves SGD, where the settings say so.
    Without a name, DeepSpeed makes its own.
    """
    name = facts.optimizer.lower()
    stays = not name or any(name in each.offloaded_names for each in OPTIMIZERS.values())
    return stays or (facts.kind == "deepspeed" and name == "deepspeedcpuadam")


def replaced_by_offload(name: str) -> str:
    """Why the states of an optimizer of this name cannot go to the host."""
    return f"with offload, DeepSpeed's Adam would replace the script's optimizer, {name}"


def changed_by_flattening(name: str) -> str:
    """Why an optimizer of this name cannot have its states divided by ZeRO."""
    return f"ZeRO flattens what it divides, and the script's optimizer, {name}, would make other steps then"


def writing_into(command: Sequence[str], folder: str) -> tuple[str, ...]:
    """`command` with `folder` for the output folders that it names."""
    words = list(command)
    for place, word in enumerate(words):
        name, equals, _ = word.partition("=")
        if name in _OUTPUT_OPTIONS and equals:
            words[place] = f"{name}={folder}"
        elif name in _OUTPUT_OPTIONS and place + 1 < len(words):
            words[place + 1] = folder
    return tuple(words)


def option_in(command: Sequence[str], option: str) -> str | None:
    """The value that `command` gives to `option`, written with a space or with an equals sign; None without it.

    The last one, where it is given several times, as argparse has it.
    """
    found = None
    for word, following in zip(command, (*command[1:], None), strict=False):
        name, equals, value = word.partition("=")
        if name == option:
            found = value if equals else following
    return found


def with_option(command: Sequence[str], option: str, value: str) -> tuple[str, ...]:
    """`command` with `value` wherever it names the option, and behind it where it does not."""
    words = list(command)
    places = [place for place, word in enumerate(words) if word.partition("=")[0] == option]
    for place in places:
        if "=" in words[place]:
            words[place] = f"{option}={value}"
        elif place + 1 < len(words):
            words[place + 1] = value
    return tuple(words if places else [*words, option, value])


def told(command: Sequence[str], options: Mapping[str, str], micro_batch: int, accumulation: int) -> tuple[str, ...]:
    """`command` with a candidate's values for the `options` that a loop has for them."""
    values = {"micro_batch": micro_batch, "accumulation": accumulation}
    words = tuple(command)
    for what, option in options.items():
        words = with_option(words, option, str(values[what]))
    return words
