"""What the user asked of a tune, and whether it can be asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ladder.candidates import RUNGS_BY_NAME, rung_name
from ladder.errors import UsageError
from ladder.text import shown
from ladder.workload import Dtype, OptimizerName, Task

_KNOB_TRIALS = 12
BF16_STATES = "bf16-states"
NUMERICS = (BF16_STATES,)
"""What `--allow` may name: these train otherwise than the plain rung does."""


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What the user asked for; None means our default. Sizes in bytes, times in seconds."""

    model: str
    gpus: int | None = None
    task: Task | None = None
    seq_len: int | None = None
    global_batch_size: int | None = None
    dtype: Dtype = "bf16"
    optimizer: OptimizerName = "adamw"
    gradient_clipping: float = 1.0
    gpu_memory: int | None = None
    host_memory: int | None = None
    nvme_path: Path | None = None
    time_budget: float | None = None
    strategy: str = "auto"
    tolerance: float = 0.02
    """How much faster than the answer a candidate left untried may be."""
    audit: float = 0.0
    """The share of the pruned candidates that is measured anyway."""
    liger: bool | None = None
    """Try each rung with Liger's kernels as well; None: where they are installed and know the model."""
    documented: bool = False
    """Nothing that lies beyond the documented ladder."""
    allow: tuple[str, ...] = ()
    """Of `NUMERICS`."""
    rungs: tuple[str, ...] = ()
    micro_batches: tuple[int, ...] = ()
    run_dir: Path | None = None
    output: Path = Path("best_config.json")
    save_weights: Path | None = None
    cold: bool = False
    wait: bool = False
    """Wait for GPUs that another tune or process uses."""
    knobs: int | None = None
    """Settings of the winner's DeepSpeed knobs to try; None: 12 where a time budget bounds them, else none."""
    launcher: Literal["local", "simulated"] = "local"
    machine: str | None = None
    """For the simulated launcher: a machine file, or the name of a bundled machine."""


def check_rungs(names: Sequence[str], option: str = "--rung", *, or_engines: bool = False) -> tuple[str, ...]:
    """UsageError for a name, given with `option`, that is no rung's (`or_engines`: nor an engine's)."""
    for name in names:
        if (rung_name(name) if or_engines else name) not in RUNGS_BY_NAME:
            raise UsageError(f"{option} {shown(name)} is unknown; the rungs are {', '.join(RUNGS_BY_NAME)}.")
    return tuple(names)


def require_text(options: TuneOptions) -> None:
    """Paths go into JSON files, which hold text: bytes that are none are refused before anything is written."""
    for value in (options.model, options.run_dir, options.output, options.nvme_path, options.save_weights):
        try:
            str(value).encode()
        except UnicodeEncodeError:
            raise UsageError(f"{shown(value)} is not valid UTF-8; rename it or choose another.") from None


def num_knob_trials(options: TuneOptions) -> int:
    """How many settings of the winner's knobs are tried."""
    if options.knobs is not None:
        return options.knobs
    return _KNOB_TRIALS if options.time_budget is not None else 0


def require_effect(options: TuneOptions) -> None:
    """Nothing is silently ignored: what only one strategy obeys is refused with another."""
    if options.audit and options.strategy != "auto":
        raise UsageError(f"--audit has no effect with --strategy {options.strategy}, which prunes nothing by belief.")
    for name in options.allow:
        if name not in NUMERICS:
            raise UsageError(f"--allow {shown(name)} is unknown; there is {', '.join(NUMERICS)}.")
    if BF16_STATES in options.allow and options.dtype != "bf16":
        raise UsageError(f"--allow {BF16_STATES} needs --dtype bf16, not {options.dtype}.")
    beyond = ["--liger"] if options.liger else []
    beyond += [f"--allow {name}" for name in options.allow]
    beyond += [f"--rung {name}" for name in options.rungs if not RUNGS_BY_NAME[name].documented]
    if options.documented and beyond:
        raise UsageError(f"--documented leaves out what {beyond[0]} asks for; give one of them.")
