"""Checks of the Hub: whether there is a token, and whether a model's configuration can be read."""

from __future__ import annotations

from collections.abc import Iterator

from ladder.doctor.check import Check, fail, ok, parted, warn
from ladder.errors import LadderError
from ladder.launch.counting import counting
from ladder.text import shown
from ladder.units import parameters_in_words


def token() -> Iterator[Check]:
    """Whether there is a token, without showing it."""
    from ladder.workload.source import hub_token

    if hub_token():
        yield ok("Hub token", "is set")
    else:
        yield ok("Hub token", "none; gated models need one: run `hf auth login`, or set HF_TOKEN")


def access(model: str) -> Iterator[Check]:
    """Whether `model` can be tuned. Only its configuration is read."""
    from ladder.workload.source import resolve_model

    try:
        shape = resolve_model(model, count=counting())
    except LadderError as error:
        yield fail("model", *parted(str(error), "name one of `ladder models`, or a folder with a usable config.json"))
        return
    size = parameters_in_words(shape.num_parameters)
    said = f"{shown(shape.name)}: {size} ({shape.source})"
    if shape.note and shape.source == "bundled":
        yield warn("model", f"{said}; {shown(shape.note)}", _fix_of(shape.note, shape.name))
    else:
        yield ok("model", f"{said}; {shown(shape.note)}" if shape.note else said)


def _fix_of(note: str, name: str) -> str:
    """How to get the Hub's configuration instead of the bundled shape."""
    if "is gated" in note:
        return f"ask for access at https://huggingface.co/{shown(name)}, and run `hf auth login`"
    if "HF_HUB_OFFLINE" in note:
        return f"unset HF_HUB_OFFLINE once, or fetch it elsewhere: hf download {shown(name)} config.json"
    return "make https://huggingface.co reachable (HTTPS_PROXY, HF_ENDPOINT), or tune the bundled shape"
