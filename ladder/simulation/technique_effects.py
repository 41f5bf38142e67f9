"""Combines the effects of an engine's techniques on the simulation. Each technique's module has its own effects."""

from __future__ import annotations

from dataclasses import replace

from ladder.candidates import Effects, Engine

NEUTRAL = Effects()


def effects_of(engine: Engine) -> Effects:
    """The combined effects of all techniques of an engine."""
    combined = NEUTRAL
    for technique in engine.techniques:
        own = {name: value for name, value in vars(technique.effects).items() if value != getattr(NEUTRAL, name)}
        combined = replace(combined, **own)
    return combined
