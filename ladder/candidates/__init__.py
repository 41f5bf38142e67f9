"""Rungs, engines and candidates: what a tune chooses from."""

from ladder.candidates.candidate import (
    CHECKPOINTING,
    HALF,
    Candidate,
    Engine,
    candidates_of,
    checkpointing_name,
    divisors,
    engines_having,
    variant_name,
)
from ladder.candidates.effects import Effects
from ladder.candidates.problem import Problem
from ladder.candidates.rungs import Knob, Place, Rung, Through
from ladder.candidates.technique import SLOTS, Consent, Export, Library, Technique, TrainerOnly

__all__ = [
    "CHECKPOINTING",
    "HALF",
    "SLOTS",
    "Candidate",
    "Consent",
    "Effects",
    "Engine",
    "Export",
    "Knob",
    "Library",
    "Place",
    "Problem",
    "Rung",
    "Technique",
    "Through",
    "TrainerOnly",
    "candidates_of",
    "checkpointing_name",
    "divisors",
    "engines_having",
    "variant_name",
]
