"""Converts a space to plain values and back, so that a run folder stores what was searched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from ladder.search.space import Space
from ladder.techniques.keys import engine_named
from ladder.workload.lora import Lora
from ladder.workload.script import Script
from ladder.workload.shapes import blocks_in
from ladder.workload.workload import ModelShape, Workload

_KNOWN = ("rates", "learned", "earlier")
"""What a space knows of its machine from before."""


def space_to_dict(space: Space) -> dict[str, Any]:
    """`space` as values for JSON."""
    facts = {field.name: getattr(space, field.name) for field in fields(space)}
    facts["workload"] = asdict(space.workload)
    facts["workload"]["model"]["config"] = dict(space.workload.model.config)
    script = space.workload.script
    facts["workload"]["script"] = script.as_dict() if script is not None else None
    facts["engines"] = [[engine.name, [list(knob) for knob in engine.knobs]] for engine in space.engines]
    facts["micro_batches"] = list(space.micro_batches)
    return facts


def knowing_what_was_known(space: Space, before: Mapping[str, Any] | None) -> Space:
    """`space` with what was known of the machine when the tune of this run folder first began.

    Otherwise what a tune has taught would have it decide anew once it is finished and started again.
    """
    if before is None:
        return space
    known: dict[str, Any] = {name: tuple(map(tuple, before.get(name, ()))) for name in _KNOWN}
    return replace(space, **known)


def space_from_dict(facts: Mapping[str, Any]) -> Space:
    """The reverse of `space_to_dict`. KeyError or TypeError for other values."""
    workload, model = dict(facts["workload"]), dict(facts["workload"]["model"])
    model |= blocks_in(model["block"], model["blocks_with"])
    model["rows"] = tuple(model["rows"])
    script = workload.pop("script", None)
    workload["script"] = Script.from_dict(script) if script is not None else None
    lora = workload.get("lora")
    workload["lora"] = Lora(**{**lora, "targets": tuple(lora["targets"])}) if lora is not None else None
    workload["freeze"] = tuple(workload.get("freeze", ()))
    names = {field.name for field in fields(Space)}  # an earlier version may have written more
    return Space(
        **{
            **{name: value for name, value in facts.items() if name in names},
            "workload": Workload(**{**workload, "model": ModelShape(**model)}),
            "engines": tuple(
                engine_named(name, tuple((knob, value) for knob, value in knobs)) for name, knobs in facts["engines"]
            ),
            "micro_batches": tuple(facts["micro_batches"]),
            "checkpointing": tuple(facts["checkpointing"]),
            **{name: tuple(map(tuple, facts.get(name, ()))) for name in _KNOWN},
        }
    )
