"""What a tune of generation tries next, and its answer: pure, from what was tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ladder.events.outcome import OutcomeKind
from ladder.events.protocol import GeneratedEvent
from ladder.generating.memory import too_much
from ladder.generating.ways import WAYS, Generation, Way
from ladder.units import gib

_SAME_BEGINNINGS = 0.5
"""Of the prompts, those whose first new token is the reference's; with fewer, a way computes something else. Chosen:
sums in another order change few of them, and whatever follows a changed token differs."""
Tokens = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One way with one batch, and how it ended."""

    way: str
    batch: int
    trial: str
    kind: OutcomeKind
    sentence: str = ""
    proof: bool = False
    seen: GeneratedEvent | None = None
    """If it fits: of the first rank, with devices, host memory and tokens of all."""

    @property
    def figures(self) -> GeneratedEvent:
        assert self.seen is not None
        return self.seen

    def tokens_per_second(self, new_tokens: int) -> float:
        """New tokens of all prompts, with the time for the prompts."""
        return self.batch * new_tokens / (self.figures.prompt_seconds + self.figures.new_seconds)

    def row(self, problem: Generation) -> dict[str, Any]:
        """As values for JSON."""
        values: dict[str, Any] = {"way": self.way, "batch": self.batch, "outcome": self.kind, "why": self.sentence}
        if self.seen is None:
            return values
        return values | {
            "prompt_tokens_per_second": round(self.batch * problem.prompt_len / self.seen.prompt_seconds, 1),
            "new_tokens_per_second": round(self.batch * (problem.new_tokens - 1) / self.seen.new_seconds, 1),
            "tokens_per_second": round(self.tokens_per_second(problem.new_tokens), 1),
            "load_seconds": round(self.seen.load_seconds, 2),
            "memory_gib": [gib(size) for size in self.seen.peak_devices],
            "host_gib": gib(self.seen.peak_host),
        }


def next_way(possible: Sequence[Way], problem: Generation, tried: Sequence[Tried]) -> tuple[Way | None, dict[str, str]]:
    """The way to try now, and by name why others before it are left out; None if none is left.

    Every token needs every weight. So a way whose weights travel is not tried once one fits whose weights travel less,
    unless the user named the ways.
    """
    left_out = dict[str, str]()
    fits = {each.way for each in tried if each.kind == "fits"}
    for way in possible:
        nearer = next((other.name for other in possible if other.name in fits and other.tier < way.tier), None)
        if any(each.way == way.name for each in tried):
            continue
        if nearer is not None and not problem.asked:
            left_out[way.name] = f"its weights travel for every token; those of {nearer}, which fits, travel less"
        elif reason := too_much(way, problem):
            left_out[way.name] = reason
        else:
            return way, left_out
    return None, left_out


def best(tried: Sequence[Tried], new_tokens: int) -> Tried | None:
    """The fastest that fits and whose proof has not failed."""
    failed = {(each.way, each.batch) for each in tried if each.proof and each.kind != "fits"}
    fits = [each for each in tried if each.kind == "fits" and not each.proof and (each.way, each.batch) not in failed]
    return max(fits, key=lambda each: each.tokens_per_second(new_tokens), default=None)


def reference_of(tried: Sequence[Tried], answer: Tried) -> Tried:
    """What the proof of `answer` is compared with: the first way with unchanged weights that generated as many prompts
    at once, not its own if there is another."""
    known = {each.way: each for each in tried if each.batch == answer.batch and each.kind == "fits" and not each.proof}
    exact = [way.name for way in WAYS if way.load_in is None and way.name != answer.way]
    return next((known[name] for name in exact if name in known), known[answer.way])


def share_that_differs(tokens: Tokens, reference: Tokens) -> float:
    """Of all new tokens, those that are others than the reference's."""
    pairs = [pair for rows in zip(tokens, reference, strict=True) for pair in zip(*rows, strict=True)]
    return sum(one != other for one, other in pairs) / len(pairs)


def generates_something_else(tokens: Tokens, reference: Tokens) -> bool:
    """Whether too few prompts go on as in the reference."""
    return share_that_differs([row[:1] for row in tokens], [row[:1] for row in reference]) > 1 - _SAME_BEGINNINGS
