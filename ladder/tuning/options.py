"""What the user asked of a tune, and whether it can be asked."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, get_args

from ladder.candidates import RUNGS_BY_NAME
from ladder.errors import UsageError
from ladder.search.policy import ALONG_THE_LADDER, STRATEGIES
from ladder.techniques.keys import engine_named
from ladder.text import shown
from ladder.tuning.consent import require_known
from ladder.units import MIB, parse_bytes
from ladder.workload.workload import Dtype, OptimizerName, Task

LauncherName = Literal["local", "simulated"]
Reader = Callable[[Any], Any]
"""Of one value, in its own type; ValueError, with what is wanted, for one that cannot be."""
_KNOB_TRIALS = 12


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
    """Names of techniques."""
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
    launcher: LauncherName = "local"
    machine: str | None = None
    """For the simulated launcher: a machine file, or the name of a bundled machine."""


def _is_engine(name: str) -> bool:
    try:
        engine_named(name)
    except KeyError:
        return False
    return True


def check_rungs(names: Sequence[str], option: str = "--rung", *, or_engines: bool = False) -> tuple[str, ...]:
    """UsageError for a name, given with `option`, that is no rung's (`or_engines`: nor an engine's)."""
    for name in names:
        if name not in RUNGS_BY_NAME and not (or_engines and _is_engine(name)):
            raise UsageError(f"{option} {shown(name)} is unknown; the rungs are {', '.join(RUNGS_BY_NAME)}.")
    return tuple(names)


def checked(options: TuneOptions) -> TuneOptions:
    """`options` with every value as its type says. UsageError, in one sentence, for one that cannot be."""
    return TuneOptions(**checked_values(vars(options)))


def checked_values(values: Mapping[str, Any], readers: Mapping[str, Reader] | None = None) -> dict[str, Any]:
    """Values by field of `TuneOptions`, or by name of `readers`, as Python callers write them, in their own types.

    A size may be a text with its unit, a path a text, and one thing may stand for a sequence of one. None is for
    fields with a default of our own. UsageError, in one sentence, for what cannot be: the search and the files would
    meet it after hours of trials.
    """
    return {name: _checked(name, value, readers or _READERS) for name, value in values.items()}


def _checked(name: str, value: Any, readers: Mapping[str, Reader]) -> Any:
    if value is None and name in _OURS_BY_DEFAULT:
        return None
    try:
        return readers[name](value)
    except ValueError as error:
        raise UsageError(f"{_OPTIONS.get(name, '--' + name.replace('_', '-'))}: {error}.") from None


def whole(least: int, most: float = math.inf) -> Callable[[Any], int]:
    """A reader of whole numbers within bounds."""
    wanted = f"a whole number of at least {least}" if most == math.inf else f"a whole number from {least} to {most}"

    def read(value: Any) -> int:
        if not isinstance(value, Integral) or isinstance(value, bool) or not least <= int(value) <= most:
            raise _unfit(value, wanted)
        return int(value)

    return read


def number(wanted: str, holds: Callable[[float], bool]) -> Callable[[Any], float]:
    """A reader of numbers for which `holds`; none may be infinite or NaN, which JSON has no words for."""

    def read(value: Any) -> float:
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number or not abs(value) < _UNBOUNDED or not holds(value):
            raise _unfit(value, wanted)
        return float(value)

    return read


def _one_of(names: Collection[str]) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError(f"{_seen(value)} is unknown; there are {', '.join(names)}")
        return value

    return read


def _sequence(read_one: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    def read(value: Any) -> tuple[Any, ...]:
        several = isinstance(value, list | tuple | set | frozenset | range)
        return tuple(map(read_one, value if several else (value,)))

    return read


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _unfit(value, "True or False")
    return value


def _size(value: Any) -> int:
    """A number is bytes; less than a MiB of them is a size without its unit."""
    return parse_bytes(value) if isinstance(value, str) else whole(MIB)(value)


def _text(value: Any, wanted: str = "a text") -> str:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise _unfit(value, wanted)
    return text


def _path(value: Any) -> Path:
    return Path(_text(value, "a path"))


def _rung(value: Any) -> str:
    return check_rungs([_text(value)])[0]


def _unfit(value: Any, wanted: str) -> ValueError:
    return ValueError(f"{_seen(value)} will not do; give {wanted}")


def _seen(value: Any) -> str:
    """`value` as Python writes it, short enough for a sentence."""
    return shown(repr(value))[:60]


_UNBOUNDED = 1e30
"""No figure that is asked for comes near it; an int that no float can hold is beyond it, too."""
_OPTIONS = {"model": "MODEL", "rungs": "--rung", "micro_batches": "--micro-batch"}
"""What the command calls them where it is not the field's name."""
_OURS_BY_DEFAULT = frozenset(field.name for field in fields(TuneOptions) if field.default is None)
_READERS: Mapping[str, Reader] = {
    "model": _text,
    "gpus": whole(0),
    "task": _one_of(get_args(Task)),
    "seq_len": whole(2),
    "global_batch_size": whole(1),
    "dtype": _one_of(get_args(Dtype)),
    "optimizer": _one_of(get_args(OptimizerName)),
    "gradient_clipping": number("a number of at least 0 (0: no clipping)", lambda norm: norm >= 0),
    "gpu_memory": _size,
    "host_memory": _size,
    "nvme_path": _path,
    "time_budget": number("a number of seconds above 0", lambda seconds: seconds > 0),
    "strategy": _one_of(STRATEGIES),
    "tolerance": number("a number from 0 to 0.5", lambda share: 0 <= share <= 0.5),
    "audit": number("a number from 0 to 1", lambda share: 0 <= share <= 1),
    "liger": _switch,
    "documented": _switch,
    "allow": _sequence(_text),
    "rungs": _sequence(_rung),
    "micro_batches": _sequence(whole(1)),
    "run_dir": _path,
    "output": _path,
    "save_weights": _path,
    "cold": _switch,
    "wait": _switch,
    "knobs": whole(0, 200),
    "launcher": _one_of(get_args(LauncherName)),
    "machine": _text,
}


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
    if options.tolerance != TuneOptions.tolerance and options.strategy != "auto":
        raise UsageError(
            f"--tolerance has no effect with --strategy {options.strategy}, which leaves nothing untried by belief; "
            "leave it out, or use --strategy auto."
        )
    require_known(options.allow)
    beyond = ["--liger"] if options.liger else []
    beyond += [f"--allow {name}" for name in options.allow]
    beyond += [f"--rung {name}" for name in options.rungs if not RUNGS_BY_NAME[name].documented]
    if options.strategy in ALONG_THE_LADDER and beyond:
        raise UsageError(
            f"--strategy {options.strategy} follows the documented ladder, and {beyond[0]} lies beyond it; "
            "leave it out, or use --strategy auto."
        )
    if options.documented and beyond:
        raise UsageError(f"--documented leaves out what {beyond[0]} asks for; give one of them.")
