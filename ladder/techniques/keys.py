"""Parses the keys of engines and candidates."""

from __future__ import annotations

import re
from dataclasses import replace

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import CHECKPOINTING, Candidate, Engine, Knob, Rung, Technique
from ladder.techniques.registry import TECHNIQUES

_KEY = re.compile(r"(?P<name>[^\[ ]+)(\[(?P<knobs>[^\]]+)\])? ckpt=(?P<ckpt>[a-z0-9/]+) mb=(?P<size>[1-9]\d*)")


def candidate_of(key: str, batch: int, world_size: int = 1) -> Candidate:
    """The candidate with this `key`, for a global `batch` on `world_size` ranks.

    ValueError for a text that is not a candidate's key.
    """
    at_once = _candidate_in(key)
    return replace(at_once, accumulation=batch // at_once.sequences(world_size))


def engine_in(candidate_key: str) -> Engine:
    """The engine of the candidate with this key. ValueError for a text that is not a candidate's key."""
    return _candidate_in(candidate_key).engine


def beside_name(candidate_key: str) -> str:
    """The part of a candidate's key after the name of its engine: knobs, if it has any, and the variant."""
    return candidate_key.removeprefix(engine_in(candidate_key).name).strip()


def _candidate_in(key: str) -> Candidate:
    """As `candidate_of`, with accumulation 1, because a key does not contain it."""
    match = _KEY.fullmatch(key)
    if match is None or match["ckpt"] not in CHECKPOINTING:
        raise ValueError(f"{key!r} is not a candidate's key")
    pairs = [pair.split("=") for pair in match["knobs"].split(",")] if match["knobs"] else []
    knobs = tuple((name, value == "True" if value in ("True", "False") else int(value)) for name, value in pairs)
    try:
        engine = engine_named(match["name"], knobs)
    except KeyError:
        raise ValueError(f"{key!r} is not a candidate's key") from None
    every, is_offloaded = CHECKPOINTING[match["ckpt"]]
    return Candidate(engine, every, int(match["size"]), 1, is_offloaded)


def engine_named(name: str, knobs: tuple[Knob, ...] = ()) -> Engine:
    """The engine with this `name`. KeyError if there is none."""
    rung = rung_of(name)
    names = name.removeprefix(rung.name).split("+")[1:]
    engine = Engine(rung, knobs)
    for each in names:
        engine = engine.having(technique_labelled(each))
    if engine.name != name:  # two techniques of one slot, or in the wrong order
        raise KeyError(name)
    return engine


def technique_labelled(label: str) -> Technique:
    """The technique with this name in a key, and its number of ranks if it has one. KeyError if there is none."""
    name, _, ranks = label.partition("=")
    return TECHNIQUES[name].in_groups_of(int(ranks) if ranks.isascii() and ranks.isdigit() else 0)


def rung_of(engine_name: str) -> Rung:
    """The rung of the engine with this name. KeyError if there is none."""
    words = engine_name.split("+")
    for number in range(len(words), 0, -1):
        if (rung := RUNGS_BY_NAME.get("+".join(words[:number]))) is not None:
            return rung
    raise KeyError(engine_name)
