"""Low-rank adapters (LoRA), in the words of peft, the library that trains them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ladder.errors import UsageError
from ladder.text import shown

ALL_LINEAR = "all-linear"
"""peft's word for every linear layer but the output head."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters beside frozen linear layers (Hu et al. 2021). The defaults are those of peft, but for the targets."""

    rank: int = 8
    alpha: int = 8
    dropout: float = 0.0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Names of linear layers, as the ends of their full names; or `ALL_LINEAR`."""
    rslora: bool = False
    dora: bool = False
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Other arguments of LoraConfig that change what is trained; `target_modules` among them if it is a pattern."""

    def for_peft(self) -> dict[str, Any]:
        """The arguments of peft's LoraConfig."""
        return {
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "target_modules": ALL_LINEAR if self.is_everywhere else list(self.targets),
            "use_rslora": self.rslora,
            "use_dora": self.dora,
            **self.more,
        }

    @property
    def is_everywhere(self) -> bool:
        """All linear layers have adapters."""
        return self.targets == (ALL_LINEAR,)

    @classmethod
    def from_peft(cls, values: Mapping[str, Any]) -> Lora:
        """The adapters of a LoraConfig with these values, of which some may be missing; others are left out."""
        targets = values.get("target_modules") or ALL_LINEAR
        more = {name: _as_json(values[name]) for name in _MORE if values.get(name) and values[name] != "none"}
        if isinstance(targets, str) and targets != ALL_LINEAR:  # a pattern for whole names
            more["target_modules"], targets = targets, ()
        return cls(
            rank=int(values.get("r", cls.rank)),
            alpha=int(values.get("lora_alpha", cls.alpha)),
            dropout=float(values.get("lora_dropout") or 0.0),
            targets=(targets,) if isinstance(targets, str) else tuple(sorted(targets)),
            rslora=bool(values.get("use_rslora")),
            dora=bool(values.get("use_dora")),
            more=more,
        )


def lora_from_text(text: str) -> Lora:
    """The adapters of `--lora TEXT`, such as `r=16,targets=q_proj,v_proj`. ValueError says what is wrong."""
    said: dict[str, list[str]] = {}
    name = ""
    for word in filter(None, (part.strip() for part in text.split(","))):
        before, equals, value = word.partition("=")
        if equals:
            name = _NAMES.get(before, "")
            if not name:
                raise ValueError(f"{before} is unknown; write it like r=16,alpha=32,dropout=0.05,targets={ALL_LINEAR}")
            said[name] = [value]
        elif word in ("rslora", "dora"):
            said[word] = ["true"]
        elif name in LISTS:
            said[name].append(word)
        else:
            raise ValueError(f"{word} is not NAME=VALUE; write it like r=16,targets={ALL_LINEAR}")
    more = {name: said.pop(name) for name in LISTS if name in said and name in _MORE}
    return Lora(**{name: _READ[name](values) for name, values in said.items()}, more=more)


def lora_from_mapping(values: Mapping[str, Any]) -> Lora:
    """The adapters of peft's arguments. ValueError for what is none, or what ladder cannot train."""
    known = [*Lora().for_peft(), *_MORE]
    unknown = sorted(name for name in values if name not in known)
    if unknown:
        raise ValueError(f"{unknown[0]} is not among {', '.join(known)}")
    try:
        return checked(Lora.from_peft(values))
    except TypeError as error:
        raise ValueError(str(error)) from None


def lora_from_file(path: Path, model: str) -> Lora:
    """The adapters in peft's adapter_config.json, for the model called `model`.

    UsageError if the file cannot be read, is for another base model, or holds what ladder cannot train.
    """
    where = shown(str(path))
    try:
        values: Any = json.loads((path / "adapter_config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--lora-file {where} cannot be read: {error}.") from None
    if not isinstance(values, dict) or values.get("peft_type") != "LORA":
        raise UsageError(f"--lora-file {where} is not peft's adapter_config.json of a LoRA adapter.")
    base = values.get("base_model_name_or_path")
    # A folder may have any name.
    if base and not Path(model).exists() and _last(base) != _last(model):
        raise UsageError(
            f"--lora-file {where} is an adapter for {shown(base)}, not for {shown(model)}; name that model, or "
            "give the adapter with --lora."
        )
    more = sorted(name for name in _NOT_TRAINED if values.get(name) and values[name] != "none")
    if more:
        raise UsageError(f"--lora-file {where}: ladder does not try adapters with {more[0]}; leave it out.")
    try:
        return checked(Lora.from_peft(values))
    except (TypeError, ValueError) as error:
        raise UsageError(f"--lora-file {where}: {error}.") from None


def checked(lora: Lora) -> Lora:
    """`lora`; ValueError for values that no adapter can have."""
    if lora.rank < 1:
        raise ValueError(f"r={lora.rank} is not a whole number of at least 1")
    if lora.alpha < 1:
        raise ValueError(f"alpha={lora.alpha} is not a whole number of at least 1")
    if not 0 <= lora.dropout < 1:
        raise ValueError(f"dropout={lora.dropout:g} is not from 0 to 1")
    if not all(lora.targets) or "" in lora.more.get("modules_to_save", ()):
        raise ValueError("a target is empty")
    return lora


_NAMES = {
    **{name: name for name in ("rank", "alpha", "dropout", "targets", "rslora", "dora")},
    **{"r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "targets"},
    **{name: name for name in ("modules_to_save", "exclude_modules")},
}
LISTS = ("targets", "modules_to_save", "exclude_modules")
"""What `--lora` takes several names for."""
_MORE = (
    *("bias", "lora_bias", "modules_to_save", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("rank_pattern", "alpha_pattern", "target_parameters", "trainable_token_indices", "ensure_weight_tying"),
)
"""Arguments of LoraConfig that change what is trained in ways that peft is asked about."""
_NOT_TRAINED = ("megatron_config", "layer_replication", "alora_invocation_tokens", "use_bdlora", "arrow_config")
"""Those that change the model itself, or what a step does."""


def _as_json(value: Any) -> Any:
    """peft keeps lists of names as sets."""
    return sorted(value) if isinstance(value, set) else value


def _last(name: str) -> str:
    return str(name).rstrip("/").rsplit("/", 1)[-1].lower()


def _whole(values: list[str]) -> int:
    try:
        return int(values[0])
    except ValueError:
        raise ValueError(f"{values[0]!r} is not a whole number") from None


def _fraction(values: list[str]) -> float:
    try:
        return float(values[0])
    except ValueError:
        raise ValueError(f"{values[0]!r} is not a number") from None


def _yes(values: list[str]) -> bool:
    if values[0].lower() not in ("true", "false"):
        raise ValueError(f"{values[0]!r} is neither true nor false")
    return values[0].lower() == "true"


_READ: dict[str, Any] = {
    "rank": _whole,
    "alpha": _whole,
    "dropout": _fraction,
    "targets": tuple,
    "rslora": _yes,
    "dora": _yes,
}
