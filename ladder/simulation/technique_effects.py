"""What an engine's techniques together change in the physics. Each technique's own stands in its module."""

from __future__ import annotations

from dataclasses import replace

from ladder.candidates import Effects, Engine

NEUTRAL = Effects()


def effects_of(engine: Engine) -> Effects:
    """The effects of all of an engine's techniques; what none of them changes is neutral."""
    combined = NEUTRAL
    for technique in engine.techniques:
        own = {name: value for name, value in vars(technique.effects).items() if value != getattr(NEUTRAL, name)}
        combined = replace(combined, **own)
    return combined
