"""The options of a workload and of a tune, and what several commands share of them.

None means that ladder chooses. Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from ladder.backends.registry import BACKENDS, RUNGS_BY_NAME
from ladder.errors import UsageError
from ladder.optimizers.registry import OPTIMIZERS
from ladder.options.declaring import Option, Switches
from ladder.options.generation import GenerationOptions
from ladder.options.kinds import DURATION, LORA, SIZE, above_zero, kind_of, number, one_of, text_of, whole
from ladder.options.technique_choices import TechniqueChoices
from ladder.techniques.keys import engine_named
from ladder.techniques.registry import TECHNIQUES, allowable
from ladder.text import instead_of, shown
from ladder.workload.lora import Lora
from ladder.workload.trained import LoadIn
from ladder.workload.workload import Dtype, OptimizerName, Task

AnyTask = Literal["causal-lm", "masked-lm", "seq2seq-lm", "generate"]
"""Those of a training, as `workload.Task`, and generating."""
LauncherName = Literal["local", "ray", "simulated"]
StrategyName = Literal["auto", "exhaustive", "walk", "reverse", "bisect"]
"""The keys of `search.policy.STRATEGIES`, written out here because importing it would double the time for `--help`."""
OutputFormat = Literal["text", "json"]

WORKLOAD, MACHINE, SEARCH = "Workload", "Machine", "Search"
BEYOND, PROOF, OUTPUT = "Beyond the documented ladder", "Proof", "Output"
MOST_GPUS = 1024
_KNOB_TRIALS = 12
ALL_BACKENDS = "all"


def _switches() -> dict[str, Option]:
    """The switches of techniques that are tried if their libraries are installed."""
    consents = [technique.consent for technique in TECHNIQUES.values()]
    return {each.switch: Option(each.help, BEYOND, unset=each.unset) for each in consents if each.switch}


def _is_engine(name: str) -> bool:
    try:
        engine_named(name)
    except KeyError:
        return False
    return True


def check_rungs(names: Sequence[str], option: str = "--rung", *, or_engines: bool = False) -> tuple[str, ...]:
    """UsageError if a name given with `option` is not a rung's (with `or_engines`: and not an engine's)."""
    for name in names:
        if name not in RUNGS_BY_NAME and not (or_engines and _is_engine(name)):
            raise UsageError(f"{option} {shown(name)} is unknown; {instead_of(name, RUNGS_BY_NAME)}")
    return tuple(names)


def _rung(value: Any) -> str:
    return check_rungs([text_of(value)])[0]


def rung_names() -> list[str]:
    return list(RUNGS_BY_NAME)


def _model_names() -> list[str]:
    from ladder.workload.source import bundled_models  # imported here and below because only shell completion needs it

    return list(bundled_models())


def machine_names() -> list[str]:
    from ladder.simulation.paper_machine import machine_files

    return list(machine_files())


def _allowable_names() -> list[str]:
    return [technique.name for technique in allowable()]


def _backend_option() -> Option:
    """What `--backend` takes, and its help, from the backends that have a word for it."""
    known = [backend for backend in BACKENDS.values() if backend.option]
    said = [f"{backend.option}: {backend.help}; " for backend in known if backend.help]
    kind = one_of([*(backend.option for backend in known), ALL_BACKENDS])
    return Option(f"{''.join(said)}{ALL_BACKENDS}: find out whether that is faster.", BEYOND, kind)


_RUNG = replace(kind_of(str), read=_rung, metavar="RUNG")


Allowed = Annotated[
    tuple[str, ...],
    Option(
        "Try also what trains with other numerics, without a safeguard, or asks something of your training script: "
        f"{', '.join(technique.name for technique in allowable())}. May be given several times.",
        BEYOND,
        metavar="NAME",
        names=_allowable_names,
    ),
]
Switched = Annotated[Mapping[str, bool], Switches(_switches)]
"""The switches of techniques that were given."""


RanksPython = Annotated[
    str,
    Option(
        "The interpreter of your training's environment, where ladder is installed in one of its own.",
        MACHINE,
        metavar="PATH",
        unset="the one with torch: ladder's own, that of your script's launcher, or the active one",
    ),
]


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """What is trained."""

    model: Annotated[
        str,
        Option(
            "A Hub id, a folder, a config.json, or a bundled shape such as tiny-llama (`ladder models`); or, in its "
            "place, `-- train.py …`: your own script.",
            WORKLOAD,
            is_argument=True,
            names=_model_names,
        ),
    ] = ""
    script: Annotated[
        tuple[str, ...],
        Option(
            "One word of your own script's command. Simpler: put the command behind `--`.", WORKLOAD, metavar="WORD"
        ),
    ] = ()
    map: Annotated[
        tuple[str, ...],
        Option(
            "Which of your script's options sets its micro_batch or accumulation, where ladder does not "
            "see it: micro_batch=--batch-size. May be given several times.",
            WORKLOAD,
            metavar="NAME=--OPTION",
        ),
    ] = ()
    task: Annotated[
        AnyTask | None,
        Option(
            "The training task; or generate: hold the model for writing text, and train nothing.",
            WORKLOAD,
            unset="the training that the model is made for",
        ),
    ] = None
    seq_len: Annotated[
        int | None,
        Option("Tokens of a sequence.", WORKLOAD, whole(2), unset="the most that the model takes, up to 2048"),
    ] = None
    global_batch_size: Annotated[
        int | None,
        Option(
            "Sequences per optimizer step over all GPUs.",
            WORKLOAD,
            whole(1),
            unset="128, rounded up to a multiple of the GPUs",
        ),
    ] = None
    dtype: Annotated[
        Dtype | None,
        Option(
            "Precision of the training.", WORKLOAD, unset="a script's own, otherwise bf16, or fp16 on GPUs without it"
        ),
    ] = None
    optimizer: Annotated[OptimizerName, Option("The optimizer of your training.", WORKLOAD, one_of(OPTIMIZERS))] = (
        "adamw"
    )
    lora: Annotated[
        Lora | None,
        Option(
            "Train LoRA adapters, in peft's words, e.g. r=16,alpha=32. Without targets=NAME all linear layers have "
            "one.",
            WORKLOAD,
            LORA,
        ),
    ] = None
    lora_file: Annotated[
        Path | None, Option("Take the adapters from peft's adapter_config.json, or its folder.", WORKLOAD)
    ] = None
    load_in: Annotated[
        LoadIn | None,
        Option("Hold the frozen weights beside the adapters in 4 bits (QLoRA: NF4) or in 8.", WORKLOAD),
    ] = None
    prepare_kbit: Annotated[
        bool,
        Option(
            "Call peft's prepare_model_for_kbit_training, as many scripts do: embeddings, head and norms are then in "
            "fp32.",
            WORKLOAD,
        ),
    ] = False
    freeze: Annotated[
        tuple[str, ...],
        Option(
            "Do not train this module, such as model.embed_tokens or model.layers.[0-15]. May be given several times.",
            WORKLOAD,
            metavar="MODULE",
        ),
    ] = ()
    python: RanksPython = ""

    @property
    def trained_task(self) -> Task | None:
        """The task of a training, once it is known that there is one (`option_checks.require_workload`)."""
        assert self.task != "generate"
        return self.task


@dataclass(frozen=True, kw_only=True)
class TuneOptions(GenerationOptions, WorkloadOptions):
    """The options of a tune."""

    gradient_clipping: Annotated[
        float, Option("The largest gradient norm; 0 means no clipping.", WORKLOAD, number(0, metavar="NORM"))
    ] = 1.0

    gpus: Annotated[
        int | None, Option("How many GPUs; 0 trains on the CPU.", MACHINE, whole(0), unset="all that are visible")
    ] = None
    nodes: Annotated[
        int | None,
        Option(
            "How many nodes of the Slurm job, of --hostfile or of the Ray cluster.",
            MACHINE,
            whole(1),
            unset="this host alone, or all hosts of --hostfile",
        ),
    ] = None
    hostfile: Annotated[
        Path | None,
        Option("A file of lines `host slots=N`: run the trials there, started by ssh.", MACHINE),
    ] = None
    gpu_memory: Annotated[
        int | None,
        Option("Limit of each GPU, e.g. 40GiB, for all that nvidia-smi counts.", MACHINE, SIZE),
    ] = None
    host_memory: Annotated[int | None, Option("Host memory that the ranks may use together.", MACHINE, SIZE)] = None
    nvme_path: Annotated[
        Path | None, Option("A folder on a fast NVMe drive. Without it, no rung uses NVMe.", MACHINE)
    ] = None
    wait: Annotated[bool, Option("Wait for GPUs that another tune or process uses, or for the CPU.", MACHINE)] = False
    launcher: Annotated[
        LauncherName,
        Option(
            "ray: run the trials on --nodes of a Ray cluster. simulated: a simulator of --machine answers each trial "
            "and the proof, and no GPU runs.",
            MACHINE,
        ),
    ] = "local"
    machine: Annotated[
        str | None,
        Option(
            "The machine of --launcher simulated: one of `ladder machines`, or a YAML file.",
            MACHINE,
            metavar="NAME|FILE",
            names=machine_names,
        ),
    ] = None

    time_budget: Annotated[
        float | None,
        Option("Give the best answer that can be found and proven in this time, e.g. 15m.", SEARCH, DURATION),
    ] = None
    strategy: Annotated[StrategyName, Option("How to search.", SEARCH)] = "auto"
    tolerance: Annotated[
        float,
        Option(
            "auto: stop when no untried candidate is likely to be faster than the answer by more than this fraction.",
            SEARCH,
            number(0, 0.5, metavar="FRACTION"),
        ),
    ] = 0.02
    knobs: Annotated[
        int | None,
        Option(
            "After the search, try N settings of the winner's DeepSpeed knobs.",
            SEARCH,
            whole(0, 200),
            unset=f"{_KNOB_TRIALS} with --time-budget, else 1 where it may help",
        ),
    ] = None
    rungs: Annotated[
        tuple[str, ...],
        Option("Try only this rung; may be given several times.", SEARCH, _RUNG, flag="--rung", names=rung_names),
    ] = ()
    micro_batches: Annotated[
        tuple[int, ...],
        Option("Try only this micro-batch; may be given several times.", SEARCH, whole(1), flag="--micro-batch"),
    ] = ()
    cold: Annotated[bool, Option("Start new processes for every trial; slower.", SEARCH)] = False

    backend: Annotated[str, _backend_option()] = ALL_BACKENDS
    documented: Annotated[bool, Option("Try nothing that lies beyond the documented ladder.", BEYOND)] = False
    switches: Switched = field(default_factory=dict)
    """The switches of techniques; ladder decides about those that are missing."""
    allow: Allowed = ()

    run_dir: Annotated[Path | None, Option("The folder for the history.", OUTPUT, unset="./ladder-runs/…")] = None
    output: Annotated[Path, Option("The file for the answer. Its companions are written beside it.", OUTPUT)] = Path(
        "best_config.json"
    )
    with_optimizer: Annotated[
        float | None,
        Option(
            "Write the optimizer with this learning rate into the answer, for a script that takes it from there.",
            OUTPUT,
            above_zero(metavar="RATE"),
        ),
    ] = None
    save_weights: Annotated[
        Path | None, Option("A folder into which the proof also writes the gathered weights.", OUTPUT)
    ] = None


def num_knob_trials(options: TuneOptions) -> int | None:
    """How many settings of the winner's knobs to try; None for those alone whose default is in doubt."""
    if options.knobs is not None:
        return options.knobs
    return _KNOB_TRIALS if options.time_budget is not None else None


def choices_in(options: TuneOptions) -> TechniqueChoices:
    """What the user said about techniques."""
    return TechniqueChoices(switches=options.switches, allow=options.allow, documented=options.documented)
