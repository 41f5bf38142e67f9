"""Which of a model's parameters are trained, and how the others are held: adapters, quantised and frozen weights.

Counts are in elements. Without adapters, quantisation and freezing, everything is trained in 16 bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ladder.errors import UsageError
from ladder.text import shown
from ladder.units import parameters_in_words
from ladder.workload.lora import ALL_LINEAR, Lora
from ladder.workload.modules import Module

if TYPE_CHECKING:
    from ladder.workload.workload import ModelShape, Workload

LoadIn = Literal["4bit", "8bit"]

BYTES_OF_A_WEIGHT: dict[LoadIn | None, float] = {None: 2.0, "4bit": 4.127 / 8, "8bit": 1.0}
"""Bytes of a frozen weight. In NF4 with double quantisation 4.127 bits (Dettmers et al. 2023, section 3). In 8 bits one
byte; a scale per row is left out."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The parameters of a workload: how many there are, which are trained, and their bytes."""

    total: int
    """All parameters, those of adapters included."""
    trained: int
    largest_trained: int
    """Elements of the largest tensor that is trained."""
    bytes_held: float
    """Of all parameters as the forward pass uses them: 16 bits, or fewer where they are quantised."""
    still: int = 0
    """Those that the model's own code does not train."""
    copied: int = 0
    """Of the trained ones those in copies of whole modules beside adapters, which peft leaves in 16 bits."""
    bytes_widened: float = 0.0
    """More than `bytes_held` where frozen weights that are not packed are in fp32."""
    quantised: int = 0
    largest_quantised: int = 0
    trains_head: bool = True
    """The output head has a gradient."""
    trained_blocks: float = 1.0
    """The share of the blocks whose own weights are trained."""
    reached_blocks: float = 1.0
    """The share of the blocks through which backward has to go: all from the first that trains anything."""
    adapted: tuple[Module, ...] = ()
    """The linear layers of a block that have adapters."""
    packed: tuple[Module, ...] = ()
    """The linear layers of a block that are quantised."""

    @property
    def is_whole(self) -> bool:
        """Whether everything is trained."""
        return self.trained + self.still == self.total


def weights_of(workload: Workload) -> Weights:
    """The parameters of `workload`, which `check_trained` has accepted."""
    model = workload.model
    if workload.lora is None and not workload.freeze:
        return _of_its_own(workload)
    modules = model.modules
    targets = adapted_of(workload.lora, modules)
    packed, width = [each for each in modules if each.packs and workload.load_in], workload.width
    num_packed = sum(each.size for each in packed)
    saved = (width - BYTES_OF_A_WEIGHT[workload.load_in]) * num_packed
    adapters = sum(adapter_elements(workload.lora, each) for each in targets)
    frozen = modules if workload.lora is not None else frozen_of(workload.freeze, modules)
    left_out = {each.name for each in frozen}
    free = [each for each in modules if each.name not in left_out]
    copies = sum(each.copied for each in modules)
    if workload.lora is not None:
        free = [each for each in modules if each.copied]
    trained = adapters + copies
    if workload.lora is None:
        trained = model.num_parameters - sum(each.elements for each in frozen) - sum(each.still for each in free)
    elif workload.script is not None:  # which may train more beside its adapters than their settings say
        adapters, trained = workload.script.facts.num_trainable - copies, workload.script.facts.num_trainable
    whole = {each.layer for each in free if each.layer is not None and each.size and not each.copied}
    return Weights(
        total=model.num_parameters + adapters + copies,
        trained=trained,
        largest_trained=max(
            (
                *(largest_of_adapter(workload.lora, each) for each in targets),
                *(each.copied or each.elements for each in free),
                1,
            )
        ),
        bytes_held=width * (model.num_parameters + adapters + copies) - saved,
        copied=0 if workload.prepare_kbit else copies,
        # bitsandbytes makes biases 16 bits again in the first forward pass.
        bytes_widened=2.0 * (model.num_parameters - sum(each.elements for each in packed)) * workload.prepare_kbit,
        quantised=num_packed,
        largest_quantised=max((each.size for each in packed), default=0),
        trains_head=any(
            each.kind == "table" and each.also if model.tied and not each.copied else each.kind == "head"
            for each in free
        ),
        trained_blocks=len(whole) / model.num_layers,
        reached_blocks=1 - _first_reached((*targets, *free), model.num_layers) / model.num_layers if modules else 1.0,
        adapted=_of_a_block(targets),
        packed=_of_a_block(packed),
    )


def _first_reached(trained: Iterable[Module], num_layers: int) -> int:
    """The first block that backward goes through to reach what is trained; `num_layers` if that lies behind them."""
    seen = [each for each in trained if each.share]
    if any(each.kind == "table" for each in seen):
        return 0
    return min((each.layer for each in seen if each.layer is not None), default=num_layers)


def _of_its_own(workload: Workload) -> Weights:
    """All parameters, or those that a script was seen to train, wherever they are."""
    model, facts = workload.model, workload.script.facts if workload.script is not None else None
    still = sum(each.still for each in model.modules)
    share = facts.num_trainable / facts.num_parameters if facts is not None else 1.0
    trained = round(share * model.num_parameters) if facts is not None else model.num_parameters - still
    return Weights(
        total=model.num_parameters,
        trained=trained,
        still=still if facts is None else min(still, model.num_parameters - trained),
        largest_trained=min(model.largest_parameter, trained),
        bytes_held=workload.width * model.num_parameters,
        trained_blocks=share,
    )


def check_trained(
    model: ModelShape, lora: Lora | None, load_in: LoadIn | None, freeze: Sequence[str], *, prepare_kbit: bool = False
) -> None:
    """UsageError, in one sentence, for adapters, quantisation or freezing that `model` cannot have."""
    modules, name = model.modules, shown(model.name)
    if lora is not None and freeze:
        raise UsageError("--freeze has no effect with --lora, which freezes all weights of the model; leave it out.")
    if load_in is not None and lora is None:
        raise UsageError(f"--load-in {load_in} needs --lora: quantised weights cannot be trained.")
    if prepare_kbit and load_in is None:
        raise UsageError("--prepare-kbit needs --load-in: it prepares a model that is loaded in 4 or 8 bits.")
    if lora is not None:
        targets = targets_of(lora, modules)
        check_targets(model, lora)
        _check_experts(lora, targets)
        # peft itself sets no limit; a router's few outputs are none either.
        layers = [each for each in targets if each.kind == "linear" and each.outputs != model.num_experts]
        narrow = min(layers, key=lambda each: min(each.inputs, each.outputs), default=None)
        if narrow is not None and lora.rank > (most := min(narrow.inputs, narrow.outputs)):
            raise UsageError(
                f"--lora r={lora.rank} is more than {narrow.last_name} of {name} has "
                f"({narrow.inputs} × {narrow.outputs}); the most is r={most}."
            )
    if "" in freeze:
        raise UsageError("--freeze needs the name of a module, such as model.embed_tokens.")
    for pattern in freeze:
        if not frozen_of([pattern], modules):
            names = ", ".join(dict.fromkeys(_generic(each.name) for each in modules))
            raise UsageError(f"--freeze {shown(pattern)} matches nothing in {name}; it has {names}.")
    if freeze and sum(each.elements for each in frozen_of(freeze, modules)) == model.num_parameters:
        raise UsageError(f"--freeze freezes all of {name}; leave something to train.")


def check_targets(model: ModelShape, lora: Lora) -> None:
    """UsageError, in one sentence, for a name of `lora` that no layer of `model` has."""
    for target in lora.targets:
        if not any(_is_called(each, target) for each in model.modules):
            raise UsageError(
                f"--lora targets={shown(target)} matches no linear layer of {shown(model.name)}; it has "
                f"{', '.join(linear_names(model.modules))}."
            )


def _check_experts(lora: Lora, targets: Iterable[Module]) -> None:
    has_experts = any(each.kind == "experts" for each in targets)
    for name, is_on in (("dropout", lora.dropout > 0), ("dora", lora.dora)):
        if has_experts and is_on:
            raise UsageError(
                f"--lora {name}: peft has none for experts; name other targets, such as targets=q_proj,v_proj."
            )


def said_of_training(workload: Workload) -> str:
    """Words for what is trained, to follow the number of parameters; empty if everything is."""
    trained = parameters_in_words(workload.weights.trained)
    if workload.lora is not None:
        kind = {"4bit": "QLoRA", "8bit": "LoRA on 8 bits", None: "LoRA"}[workload.load_in]
        prepared = ", prepared by prepare_model_for_kbit_training" if workload.prepare_kbit else ""
        return f", {trained} trained by {kind} with r={workload.lora.rank}{prepared}"
    return f", {trained} trained" if workload.freeze else ""


def targets_of(lora: Lora | None, modules: Iterable[Module]) -> tuple[Module, ...]:
    """The modules that get adapters."""
    if lora is None:
        return ()
    if lora.more:
        return tuple(each for each in modules if each.adapted)
    return tuple(each for each in modules if any(_is_called(each, target) for target in lora.targets))


def adapted_of(lora: Lora | None, modules: Iterable[Module]) -> tuple[Module, ...]:
    """As `targets_of`; where a script's own words match no name, as if all linear layers had adapters."""
    modules = tuple(modules)
    found = targets_of(lora, modules)
    return found if found or lora is None else tuple(each for each in modules if each.kind == "linear")


def frozen_of(patterns: Sequence[str], modules: Iterable[Module]) -> tuple[Module, ...]:
    """The modules that `--freeze` freezes: by the name of any that has their parameters."""
    compiled = [freeze_pattern(pattern) for pattern in patterns]
    return tuple(
        each for each in modules if any(one.fullmatch(name) for one in compiled for name in (each.name, *each.also))
    )


def freeze_pattern(text: str) -> re.Pattern[str]:
    """A name of modules as a regular expression; `[0-15]` stands for the numbers 0 to 15, `*` for any name."""
    pieces = []
    for piece in re.split(r"(\[\d+-\d+\]|\*)", text):
        if piece == "*":
            pieces.append(r"[^.]+")
        elif found := re.fullmatch(r"\[(\d+)-(\d+)\]", piece):
            low, high = int(found[1]), int(found[2])
            pieces.append("(?:" + "|".join(map(str, range(low, min(high, low + 10_000) + 1))) + ")")
        else:
            pieces.append(re.escape(piece))
    return re.compile("".join(pieces) + r"(?:\..*)?")


def adapter_elements(lora: Lora | None, module: Module) -> int:
    """Elements of the adapter of one module, with DoRA's magnitudes: as many for each rank as peft gives it."""
    if lora is None:
        return 0
    if lora.more:
        return module.adapted
    for_each = module.adapter if lora.is_everywhere else module.inputs + module.outputs
    return lora.rank * for_each + (module.outputs if lora.dora else 0)


def largest_of_adapter(lora: Lora | None, module: Module) -> int:
    """Elements of the larger of an adapter's two matrices."""
    larger, both = max(module.inputs, module.outputs), module.inputs + module.outputs
    return adapter_elements(lora, module) * (larger or 1) // (both or 2)  # halves where the sides are not known


def linear_names(modules: Iterable[Module]) -> list[str]:
    """The last parts of the names of linear layers, each once."""
    return list(dict.fromkeys(each.last_name for each in modules if each.kind == "linear"))


def _of_a_block(targets: Sequence[Module]) -> tuple[Module, ...]:
    """The targets in the last block, which has all kinds: a decoder's has those of an encoder's."""
    last = max((matrix.layer for matrix in targets if matrix.layer is not None), default=None)
    return tuple(matrix for matrix in targets if matrix.layer == last and last is not None)


def _is_called(module: Module, target: str) -> bool:
    """As peft matches names: the whole name or its end behind a dot; what "all-linear" reaches it was asked."""
    if target == ALL_LINEAR:
        return module.adapter > 0
    return module.takes_adapters and f".{module.name}".endswith(f".{target}")


def _generic(module: str) -> str:
    """`model.layers.*.mlp.up_proj` of that module in any block."""
    return re.sub(r"\.\d+\.", ".*.", module)
