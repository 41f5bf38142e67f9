"""The options of a tune as the words of its command line: the reverse of what typer does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ladder.options.declaring import Declared, declared, spread
from ladder.options.kinds import DURATION, SIZE
from ladder.options.tune import TuneOptions
from ladder.units import GIB, MIB
from ladder.workload.lora import LISTS, Lora

_SIZES = ((GIB, "GiB"), (MIB, "MiB"), (1, "B"))
_HOUR, _MINUTE = 3600, 60
"""Defined: seconds of the units that `option_kinds.duration` reads."""


def words_of(options: TuneOptions) -> list[str]:
    """The words behind `ladder tune` that give `options`; those with their default are left out."""
    known, defaults = declared(TuneOptions), spread(TuneOptions())
    words: list[str] = []
    for name, value in spread(options).items():
        if value != defaults[name] and name not in ("model", "script"):
            words += _words(known[name], value)
    model = [options.model] if options.model else []
    return [*model, *words, *(["--", *options.script] if options.script else [])]


def _words(option: Declared, value: Any) -> Iterator[str]:
    if option.kind.typed is bool:
        yield option.flag if value else f"--no-{option.flag.removeprefix('--')}"
        return
    for each in value if option.several else (value,):
        # One word each, so that a value that begins with a dash is no option.
        yield f"{option.flag}={_text(option, each)}"


def _text(option: Declared, value: Any) -> str:
    if option.kind is SIZE:
        return next(f"{value // unit}{name}" for unit, name in _SIZES if not value % unit)
    if option.kind is DURATION:
        whole = [(unit, name) for unit, name in ((_HOUR, "h"), (_MINUTE, "m")) if not value % unit]
        return f"{value / whole[0][0]:.0f}{whole[0][1]}" if whole else f"{value!r}s"
    return _adapters(value) if isinstance(value, Lora) else str(value)


def _adapters(lora: Lora) -> str:
    """As `lora_from_text` reads them."""
    given = [f"r={lora.rank}", f"alpha={lora.alpha}", f"dropout={lora.dropout!r}"]
    given += [name for name in ("rslora", "dora") if getattr(lora, name)]
    lists = {"targets": lora.targets, **{name: names for name, names in lora.more.items() if name in LISTS}}
    return ",".join([*given, *(f"{name}={','.join(names)}" for name, names in lists.items())])
