"""Compares losses with the reference engine's, each engine once: not again where an earlier tune here did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ladder.backends.registry import REFERENCE
from ladder.candidates import Candidate, Engine
from ladder.events.protocol import TrialSpec
from ladder.machine.cache import cache_folder, keep
from ladder.machine.described import Machine
from ladder.machine.known_machine import facts_of
from ladder.techniques.registry import TECHNIQUES
from ladder.text import digest_of
from ladder.tuning.parity import Parity, as_parity_candidate, as_reference, compare
from ladder.tuning.tune_events import Note, Subscriber
from ladder.tuning.versions import package_versions

LIBRARIES = (
    "bitsandbytes",
    "peft",
    "triton",
    *(library.distribution for technique in TECHNIQUES.values() for library in technique.libraries),
)
"""Beside those that every answer names: they compute in some trials."""
_OF_ONE_TUNE = {"trial", "folder", "gpu_uuids", "memory_limit", "save_folder", "stop_at"}
"""What a trial's losses do not depend on."""


@dataclass(frozen=True, kw_only=True)
class Agreements:
    """Those on one machine. Where they cannot be read or written, nothing is known of any."""

    machine: Machine

    def have(self, specs: Sequence[TrialSpec]) -> bool:
        """Whether the losses of trials like these agreed."""
        return self._is_of_one_host and self._file_of(specs).exists()

    def add(self, specs: Sequence[TrialSpec], losses: Sequence[Sequence[float]]) -> None:
        """Keep that they do, with the losses of each."""
        if self._is_of_one_host:
            keep(self._file_of(specs), {**self._facts, "losses": losses})

    @property
    def _is_of_one_host(self) -> bool:
        """Nothing is known of the libraries on other nodes."""
        return self.machine.num_nodes == 1

    @property
    def _facts(self) -> dict[str, Any]:
        return {"machine": facts_of(self.machine), "libraries": package_versions(LIBRARIES)}

    def _file_of(self, specs: Sequence[TrialSpec]) -> Path:
        trained = [{name: each for name, each in asdict(spec).items() if name not in _OF_ONE_TUNE} for spec in specs]
        return cache_folder() / "losses" / f"{digest_of({**self._facts, 'trials': trained}, 16)}.json"


class ShallowTrials(Protocol):
    """What runs the trials."""

    def shallow_trial(self, candidate: Candidate, same_data: bool) -> TrialSpec: ...

    def losses(self, candidate: Candidate, same_data: bool) -> list[float]: ...


@dataclass(kw_only=True, eq=False)
class Comparisons:
    """Those of one tune, whose tuners share them."""

    agreements: Agreements | None = None
    """Without it, every comparison is made."""
    reference: Engine = REFERENCE
    _reference: dict[tuple[str, bool], list[float]] = field(default_factory=dict)
    """Losses of reference engines, by the candidate's key and whether all ranks had the same data."""
    _agreed: set[Engine] = field(default_factory=set)
    """The engines whose losses agreed in this tune."""

    @property
    def has_reference(self) -> bool:
        """Whether the next comparison needs one trial and not two."""
        return bool(self._reference)

    def of(self, candidate: Candidate, trials: ShallowTrials, tell: Subscriber) -> Parity:
        """Whether the losses of `candidate` fall like those of what it is compared with."""
        own, plain = as_parity_candidate(candidate), as_reference(candidate, self.reference)
        if own == plain:
            return Parity(agrees=True)
        same_data = own.engine.shares_sequences
        specs = [trials.shallow_trial(each, same_data) for each in (own, plain)]
        if self.agreements is not None and self.agreements.have(specs):
            if own.engine not in self._agreed:
                tell(Note(f"The losses of {own.engine.key} and {plain.engine.key} agreed in an earlier tune here."))
            return Parity(agrees=True)
        against = plain.key, same_data
        losses = trials.losses(own, same_data)  # first, as it may run in the processes of the trial before
        if losses and not self._reference.get(against):
            self._reference[against] = trials.losses(plain, same_data)
        reference = self._reference.get(against, [])
        parity = compare(losses, reference, candidate.engine, plain.engine)
        if parity.agrees and self.agreements is not None:
            self.agreements.add(specs, (losses, reference))
            self._agreed.add(own.engine)
        return parity
