"""What a tune of generation tries next, and its answer: pure, from what was tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ladder.errors import EnvironmentFaultError
from ladder.events.outcome import OutcomeKind
from ladder.generating.memory import too_much
from ladder.generating.ways import WAYS, Generation, Way
from ladder.units import gib

_SAME_BEGINNINGS = 0.5
"""Of the prompts, those whose first new token is the reference's; with fewer, a way computes something else. Chosen:
sums in another order change few of them, and whatever follows a changed token differs."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a trial measured. Seconds are of the slowest rank, bytes of each GPU, or of each CPU rank."""

    load_seconds: float
    prompt_seconds: float
    """Until the first new token of all prompts."""
    new_seconds: float
    """For all further ones."""
    devices: tuple[int, ...]
    host: int
    """Of all ranks together."""
    tokens: tuple[tuple[int, ...], ...]
    """The new ones, by prompt."""
    model_class: str
    """Of transformers, that loads the model."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One way with one batch, and how it ended."""

    way: str
    batch: int
    trial: str
    kind: OutcomeKind
    sentence: str = ""
    proof: bool = False
    figures: Figures | None = None

    def tokens_per_second(self, new_tokens: int) -> float:
        """New tokens of all prompts, with the time for the prompts."""
        assert self.figures is not None
        return self.batch * new_tokens / (self.figures.prompt_seconds + self.figures.new_seconds)

    def row(self, prompt_len: int, new_tokens: int) -> dict[str, Any]:
        """As values for JSON."""
        values: dict[str, Any] = {"way": self.way, "batch": self.batch, "outcome": self.kind, "why": self.sentence}
        if self.figures is None:
            return values
        found = self.figures
        return values | {
            "prompt_tokens_per_second": round(self.batch * prompt_len / found.prompt_seconds, 1),
            "new_tokens_per_second": round(self.batch * (new_tokens - 1) / found.new_seconds, 1),
            "tokens_per_second": round(self.tokens_per_second(new_tokens), 1),
            "load_seconds": round(found.load_seconds, 2),
            "memory_gib": [gib(size) for size in found.devices],
            "host_gib": gib(found.host),
        }


def next_way(possible: Sequence[Way], problem: Generation, tried: Sequence[Tried]) -> tuple[Way | None, dict[str, str]]:
    """The way to try now, and by name why others before it are left out; None if none is left.

    Every token needs every weight. So a way whose weights travel is not tried once one fits whose weights travel less,
    unless the user named the ways.
    """
    left_out = dict[str, str]()
    names = {each.way for each in tried}
    fitting = [way for way in possible if any(each.way == way.name and each.kind == "fits" for each in tried)]
    for way in possible:
        if way.name in names:
            continue
        nearer = next((other for other in fitting if other.tier < way.tier), None)
        if nearer is not None and not problem.asked:
            left_out[way.name] = (
                f"its weights travel for every token, and those of {nearer.name}, which fits, travel less"
            )
        elif reason := too_much(way, problem):
            left_out[way.name] = reason
        else:
            return way, left_out
    return None, left_out


def best(tried: Sequence[Tried], problem: Generation) -> Tried | None:
    """The fastest that fits and whose proof has not failed."""
    failed = {(each.way, each.batch) for each in tried if each.proof and each.kind != "fits"}
    fits = [each for each in tried if each.kind == "fits" and not each.proof and (each.way, each.batch) not in failed]
    return max(fits, key=lambda each: each.tokens_per_second(problem.new_tokens), default=None)


def proof_of(tried: Sequence[Tried], answer: Tried) -> Tried | None:
    found = (each for each in tried if each.proof and (each.way, each.batch) == (answer.way, answer.batch))
    return next(found, None)


def reference_of(tried: Sequence[Tried], answer: Tried) -> Tried:
    """What the proof of `answer` is compared with: the first exact way that generated as many prompts at once, not its
    own if there is another."""
    exact = [way.name for way in WAYS if way.is_exact and way.name != answer.way]
    known = {each.way: each for each in tried if each.batch == answer.batch and each.kind == "fits" and not each.proof}
    return next((known[name] for name in exact if name in known), answer)


def share_that_differs(tokens: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> float:
    """Of all new tokens, those that are others than the reference's."""
    pairs = [pair for rows in zip(tokens, reference, strict=True) for pair in zip(*rows, strict=True)]
    return sum(one != other for one, other in pairs) / len(pairs)


def generates_something_else(tokens: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> bool:
    """Whether too few prompts go on as in the reference."""
    same = sum(one[0] == other[0] for one, other in zip(tokens, reference, strict=True))
    return same < _SAME_BEGINNINGS * len(tokens)


def require_weights_written(tried: Tried | None) -> None:
    """EnvironmentFaultError if the trial that wrote the random weights failed."""
    if tried is not None:
        raise EnvironmentFaultError(
            f"Random weights could not be written for the trials ({tried.sentence}); give a folder that has the "
            "model's weights, or free memory and disk space."
        )
