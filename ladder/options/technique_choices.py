"""Which techniques a tune tries: those that the user asked for or allowed, and those whose libraries are installed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ladder.candidates import Engine, Problem, Rung, Technique
from ladder.errors import EnvironmentFaultError, UsageError
from ladder.machine.interpreter import has_module, version_of
from ladder.machine.versions import is_within
from ladder.techniques.registry import TECHNIQUES, WAYS_OF_CHECKPOINTING, allowable
from ladder.text import instead_of, shown
from ladder.workload.workload import Workload


@dataclass(frozen=True, kw_only=True)
class TechniqueChoices:
    """What the user said about techniques."""

    switches: Mapping[str, bool | None] = field(default_factory=dict)
    """By the switch's name. None or no entry: try it if its libraries are installed."""
    allow: Collection[str] = ()
    documented: bool = False
    """Try nothing beyond the documented ladder."""

    def wants(self, technique: Technique) -> bool | None:
        """True if the user asked for it, False if they declined it, None if they said nothing."""
        if not technique.consent.switch:
            return technique.name in self.allow
        return False if self.documented else self.switches.get(technique.consent.switch)

    def leaves_open(self, technique: Technique) -> bool:
        """Whether the user said nothing about it."""
        if not technique.consent.switch:
            return not self.documented and technique.name not in self.allow
        return self.wants(technique) is None

    @property
    def options(self) -> list[str]:
        """The options given that ask for something beyond the documented ladder."""
        switched = [f"--{name}" for name, value in self.switches.items() if value]
        return switched + [f"--allow {name}" for name in self.allow]


def require_known(allow: Collection[str]) -> None:
    """UsageError for a name that is no technique's."""
    names = [technique.name for technique in allowable()]
    for name in allow:
        if name not in names:
            raise UsageError(f"--allow {shown(name)} is unknown; {instead_of(name, names)}")


def techniques_tried(choices: TechniqueChoices, workload: Workload, device: str, *, on_paper: bool) -> list[Technique]:
    """In the registry's order. UsageError or EnvironmentFaultError if one that was asked for cannot be used."""
    tried = []
    for technique in TECHNIQUES.values():
        wanted = choices.wants(technique)
        if wanted:
            require_usable(technique, workload, device, on_paper=on_paper)
        if wanted is None:
            wanted = not on_paper and not technique.refusal(workload, device) and not _missing(technique)
        if wanted:
            tried.append(technique)
    return tried


def require_effective_techniques(techniques: Sequence[Technique], problem: Problem, rungs: Sequence[Rung]) -> None:
    """UsageError for an allowed technique that cannot be used with any of these rungs here."""
    for technique in techniques:
        if technique.consent.switch or any(technique.gets_into(rung, problem) for rung in rungs):
            continue
        option = technique.consent.option(technique.name)
        raise UsageError(f"{option} has no effect here: {technique.why_not}; leave it out.")


def require_usable(technique: Technique, workload: Workload, device: str, *, on_paper: bool = False) -> None:
    """UsageError if it cannot train `workload` on `device`, EnvironmentFaultError if a library is missing."""
    if refusal := technique.refusal(workload, device):
        raise UsageError(refusal)
    if not on_paper and (missing := _missing(technique)):
        raise EnvironmentFaultError(missing)


def advice(choices: TechniqueChoices, problem: Problem, rungs: Sequence[Rung]) -> list[str]:
    """Sentences on techniques that a tune of these rungs tries unasked, or could try."""
    sentences = (
        technique.advice(problem, installed=not _missing(technique))
        for technique in TECHNIQUES.values()
        if choices.leaves_open(technique) and any(technique.gets_into(rung, problem) for rung in rungs)
    )
    return [sentence for sentence in sentences if sentence]


def ways_of_checkpointing(transformers: str, *, documented: bool = False) -> tuple[str, ...]:
    """Names of the ways of checkpointing that this version of transformers knows."""
    if documented:
        return ()
    return tuple(name for name, way in WAYS_OF_CHECKPOINTING.items() if is_within(transformers, f">={way.since}"))


def libraries_of(engine: Engine) -> list[str]:
    """The libraries that `engine` needs. They are not in a history's fingerprint: other engines run without them."""
    return [library.distribution for technique in engine.techniques for library in technique.libraries]


def require_adapters(workload: Workload) -> None:
    """EnvironmentFaultError if a library is missing with which the adapters of `workload` are trained."""
    needed = [("--lora", "peft")] if workload.lora is not None else []
    needed += [(f"--load-in {workload.load_in}", "bitsandbytes")] if workload.load_in is not None else []
    for option, name in needed:
        if not has_module(name):
            raise EnvironmentFaultError(f"{option} needs {name}, which is not installed; `pip install {name}`.")
    found = version_of("transformers")
    if workload.load_in is not None and not is_within(found, ">=5"):
        raise EnvironmentFaultError(f"--load-in {workload.load_in} needs transformers 5 or later, and not {found}.")


def _missing(technique: Technique) -> str:
    """A sentence about a missing library; empty if all are installed."""
    for library in technique.libraries:
        if not library.since and not has_module(library.module):
            return f"{library.distribution} is not installed; `pip install {library.distribution}`."
        if library.since and not is_within(found := version_of(library.distribution), f">={library.since}"):
            option = technique.consent.option(technique.name)
            return f"{option} needs {library.distribution} {library.since} or later; {found or 'none'} is installed."
    return ""
