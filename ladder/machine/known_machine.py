"""What was measured of this machine, and what tunes taught about it: one file a machine in the user's cache.

The file's name is a digest of `facts_of` the machine, which are in the file too. A file with other facts, an old one,
and one that cannot be read are ignored, and the reason is said in one sentence: the search then starts from data
sheets.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ladder.machine.cache import cache_folder, keep
from ladder.machine.described import Machine
from ladder.machine.gpus import driver_version
from ladder.machine.interpreter import version_of
from ladder.machine.rates import Points, rates_of
from ladder.text import digest_of, shown

VERSION = 1
"""Of the file's format and of what is measured. Chosen: increased when older figures would mean something else."""
_OLDEST_SECONDS = 180 * 86400.0
"""Chosen: half a year. Driver and torch are among the facts; what else changes (cooling, firmware) changes slowly."""
_MOST_TUNES = 20
"""Of which the file names the source. Chosen: enough to see where its figures come from."""


@dataclass(frozen=True, kw_only=True)
class KnownMachine:
    """The content of a file. All rates are finite and positive."""

    facts: dict[str, Any]
    """What tells this machine from others."""
    measured_at: float | None = None
    """Seconds since 1970; None if `ladder doctor --measure` has not run, and only tunes taught something."""
    rates: dict[str, float] = field(default_factory=dict)
    """By `MachineSpeed`'s terms, see `rates_of`."""
    points: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Everything that was measured, for people."""
    drive: str | None = None
    """The folder whose drive was measured."""
    learned: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By unknown of the speed model: mean and standard deviation, in units of its prior with these `rates`."""
    tunes: list[dict[str, Any]] = field(default_factory=list)
    """Where `learned` comes from, the latest last."""


def facts_of(machine: Machine) -> dict[str, Any]:
    """What tells the machine, or several nodes together, from others whose figures would mislead."""
    several = {"nodes": machine.num_nodes} if machine.num_nodes > 1 else {}
    return {
        **several,
        "device": machine.device,
        "gpu": machine.gpu_name,
        "ranks": machine.world_size,
        "cores": machine.num_cores,
        **(machine.elsewhere or facts_of_host(machine.device)),
    }


def facts_of_host(device: str) -> dict[str, Any]:
    """What tells this host from others with as many GPUs of the same name."""
    return {
        "driver": driver_version() if device == "cuda" else None,
        "cpu": _cpu_name(),
        "torch": version_of("torch") or "not installed",
    }


def facts_of_nodes(names: Sequence[str], first: Mapping[str, Any]) -> dict[str, Any]:
    """The same of nodes, of which the `first` says it of itself.

    Nodes of another kind of name, of another partition or cluster, may have another network. Of one kind, a job gets
    now these and now those: so numbers do not count, and node1 and node2 are "node#".
    """
    if len(names) == 1:
        return dict(first)
    return {**first, "names": sorted({re.sub(r"\d+", "#", name) for name in names})}


def file_of(facts: Mapping[str, Any]) -> Path:
    """Where the machine with these facts has its file."""
    return cache_folder() / "machines" / f"{digest_of(facts, 16)}.json"


def read_known(facts: Mapping[str, Any]) -> tuple[KnownMachine | None, str]:
    """What is known of the machine with these facts; or None, and why its file is ignored, if there is one."""
    file = file_of(facts)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError):
        return None, _ignored(file, "cannot be read")
    try:
        if content["version"] != VERSION:
            return None, _ignored(file, "is of another version of ladder")
        known = _checked(content)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None, _ignored(file, "is damaged")
    if known.facts != dict(facts):
        return None, _ignored(file, "describes another machine")
    if known.measured_at is not None and not 0 <= time.time() - known.measured_at <= _OLDEST_SECONDS:
        return None, _ignored(file, "is older than half a year, or from the future")
    return known, ""


def keep_known(known: KnownMachine) -> bool:
    """Write the file; False where the cache cannot be written, so that the next tune knows no more than this one."""
    return keep(file_of(known.facts), {"version": VERSION, **asdict(known)})


def measured(facts: Mapping[str, Any], points: Points, drive: tuple[str, float] | None) -> KnownMachine:
    """What follows from new measurements. What tunes taught was relative to older ones, so it is given up."""
    rates = rates_of(points, int(facts["ranks"]), int(facts.get("nodes", 1)))
    if drive is not None:
        rates["nvme_bytes"] = drive[1]
    return KnownMachine(
        facts=dict(facts),
        measured_at=time.time(),
        rates=rates,
        points={name: list(each) for name, each in points.items()},
        drive=drive[0] if drive is not None else None,
    )


def taught(known: KnownMachine, learned: Mapping[str, tuple[float, float]], source: Mapping[str, Any]) -> KnownMachine:
    """`known` after one more tune."""
    return KnownMachine(
        **{
            **{name: getattr(known, name) for name in known.__dataclass_fields__},
            "learned": {**known.learned, **learned},
            "tunes": [*known.tunes, dict(source)][-_MOST_TUNES:],
        }
    )


def _checked(content: Mapping[str, Any]) -> KnownMachine:
    """ValueError, KeyError or TypeError if `content` is not what `keep_known` writes."""
    rates = {str(name): float(rate) for name, rate in content["rates"].items()}
    learned = {str(name): (float(mean), float(sigma)) for name, (mean, sigma) in content["learned"].items()}
    measured_at = content["measured_at"]
    if not all(math.isfinite(rate) and rate > 0 for rate in rates.values()):
        raise ValueError("a rate is not positive")
    if not all(math.isfinite(mean) and math.isfinite(sigma) and sigma > 0 for mean, sigma in learned.values()):
        raise ValueError("what was learned is not a distribution")
    return KnownMachine(
        facts=dict(content["facts"]),
        measured_at=None if measured_at is None else float(measured_at),
        rates=rates,
        points={str(name): list(points) for name, points in content["points"].items()},
        drive=content["drive"],
        learned=learned,
        tunes=list(content["tunes"]),
    )


def _ignored(file: Path, why: str) -> str:
    return f"What was measured of this machine is ignored, because {shown(file)} {why}; run `ladder doctor --measure`."


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
