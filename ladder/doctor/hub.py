"""The Hub: whether a token is there, and whether a model's configuration can be had."""

from __future__ import annotations

from collections.abc import Iterator

from ladder.doctor.check import Check, fail, ok, warn
from ladder.errors import LadderError
from ladder.text import shown
from ladder.units import parameters_in_words


def token() -> Iterator[Check]:
    """That there is a token; never which."""
    from ladder.workload.source import hub_token

    if hub_token():
        yield ok("Hub token", "is set")
    else:
        yield ok("Hub token", "none; gated models need one: set HF_TOKEN (what `hf auth login` stores is not read)")


def access(model: str) -> Iterator[Check]:
    """Whether trials could take `model`: only its configuration is asked for."""
    from ladder.workload.source import resolve_model

    try:
        shape = resolve_model(model)
    except LadderError as error:
        yield fail("model", str(error), "see what the sentence says")
        return
    size = parameters_in_words(shape.num_parameters)
    said = f"{shown(shape.name)}: {size} ({shape.source})"
    if shape.note and shape.source == "bundled":
        yield warn("model", f"{said}; {shown(shape.note)}", "set HF_TOKEN, and ask for access on the model's page")
    else:
        yield ok("model", f"{said}; {shown(shape.note)}" if shape.note else said)
