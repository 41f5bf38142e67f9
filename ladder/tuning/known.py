"""What is known of this machine before a tune, and what a tune adds for the next one, of any model."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladder.doctor.drive import read_speed
from ladder.events.outcome import Record
from ladder.launch.machine_measuring import measure_points
from ladder.launch.rank_environment import rank_environment, without_gpus
from ladder.machine.cache import cache_folder, keep
from ladder.machine.described import Machine
from ladder.machine.known_machine import KnownMachine, facts_of, keep_known, measured, read_known, taught
from ladder.machine.nvme import check_nvme_path
from ladder.machine.rates import Found
from ladder.machine.versions import package_versions
from ladder.report.noise import taken
from ladder.search.belief import believe
from ladder.search.ceiling import had_memory
from ladder.search.space import Space
from ladder.search.speed import lessons
from ladder.text import digest_of
from ladder.tuning.parity import LIBRARIES
from ladder.tuning.tune_events import Note, Subscriber
from ladder.workload.workload import Workload

if TYPE_CHECKING:
    from ladder.launch.nodes.cluster import Cluster


def with_known(machine: Machine, workload: Workload, tell: Subscriber) -> Machine:
    """`machine` with what is known of it, and of `workload` on it. The user is told of a file that is ignored."""
    machine = replace(machine, earlier=EarlierSteps(machine=machine, workload=workload).read())
    known, ignored = read_known(facts_of(machine))
    if ignored:
        tell(Note(ignored))
    if known is None:
        return machine
    rates = dict(known.rates)
    if machine.nvme_path is None or str(machine.nvme_path) != known.drive:
        rates.pop("nvme_bytes", None)
    return replace(machine, rates=rates, learned=known.learned)


def measure(machine: Machine) -> tuple[KnownMachine, dict[str, str], bool]:
    """Measure this host now and keep it; also what failed, with the reasons, and whether it could be kept.

    EnvironmentFaultError if nothing can be measured.
    """
    found = measure_points(machine, rank_environment(machine))
    drive = None
    if machine.nvme_path is not None:
        write, read = check_nvme_path(machine.nvme_path), read_speed(machine.nvme_path)
        drive = (str(machine.nvme_path), 2 / (1 / write + 1 / read))  # a step reads about as much as it writes
    return _kept(machine, found, drive)


def measure_nodes(machine: Machine, cluster: Cluster) -> tuple[KnownMachine, dict[str, str], bool]:
    """The same of the nodes of `cluster`, which together are `machine`, but for their drives."""
    environment = without_gpus(rank_environment(machine))
    return _kept(machine, cluster.measured(machine.world_size // machine.num_nodes, environment), None)


def _kept(machine: Machine, found: Found, drive: tuple[str, float] | None) -> tuple[KnownMachine, dict[str, str], bool]:
    known = measured(facts_of(machine), found["rates"], drive)
    return known, found["failed"], keep_known(known)


def learn(machine: Machine, space: Space, records: Sequence[Record], run_dir: Path, tell: Subscriber) -> None:
    """Keep what this tune's trials say about the machine.

    Nothing is kept where they contradict what was measured, or where other programs slowed them.
    """
    if any(map(taken, records)):
        return
    belief = believe(space, records)
    steps = EarlierSteps(machine=machine, workload=space.workload)
    steps.add(records, instead=belief.earlier.is_contradicted)
    if not _teaches(space.workload):
        return
    if not belief.trusts_what_is_known:
        tell(
            Note(
                "This tune's trials contradict what was measured of this machine before, so it was not used; "
                "`ladder doctor --measure` measures it again."
            )
        )
        return
    found = lessons(belief.speed, [engine.rung for engine in space.engines], dict(machine.learned))
    facts = facts_of(machine)
    known, _ = read_known(facts)
    trials = len({record.trial for record in records})
    source = {"run": str(run_dir.absolute()), "model": space.workload.model.name, "trials": trials}
    known = known or KnownMachine(facts=facts)
    if not found or any(source.items() <= tune.items() for tune in known.tunes):
        return  # nothing new was measured
    keep_known(taught(known, found, source))


def _teaches(workload: Workload) -> bool:
    """Whether what its steps take more than predicted is mostly the machine's.

    A script adds work of its own: TRL's GRPO generates for most of its step, which would pass for slow arithmetic. And
    the prediction counts no cost of routing tokens to experts. Measured: adapters of a mixture of experts with 3
    billion parameters took twice as long as predicted on an H200.
    """
    has_experts = any(each.kind == "experts" for each in workload.model.modules)
    return workload.script is None and not has_experts


_OLDEST_SECONDS = 30 * 86400.0
"""Chosen: a month. Versions, driver and cores are among the facts; what else changes does so slowly."""


@dataclass(frozen=True, kw_only=True)
class EarlierSteps:
    """Those of one workload on one machine. Where they cannot be read or written, nothing is known of any."""

    machine: Machine
    workload: Workload

    def read(self) -> tuple[tuple[str, float | None, float], ...]:
        """By candidate key: seconds of a micro-step without and with the optimizer; the former None if not measured."""
        if not self._are_kept:
            return ()
        oldest = time.time() - _OLDEST_SECONDS
        return tuple((key, micro, last) for key, (micro, last, at) in self._stored().items() if at >= oldest)

    def add(self, records: Sequence[Record], *, instead: bool = False) -> None:
        """Keep what `records` of a tune say, unless memory was too short to say it.

        `instead` of what earlier tunes said, which then no longer counts; otherwise beside it.
        """
        found = {
            record.candidate_key: (seen.accumulate_seconds, seen.boundary_seconds, time.time())
            for record in records
            if record.purpose == "measure" and (seen := record.measurement) is not None
            if had_memory(seen, self.machine.memory_limit)
        }
        if found and self._are_kept:
            before = {} if instead else self._stored()
            keep(self._file, {"facts": self._facts, "steps": {**before, **found}})

    @property
    def _are_kept(self) -> bool:
        """A script's steps depend on its data, and nothing is known of the libraries on other nodes."""
        return self.workload.script is None and self.machine.num_nodes == 1

    @property
    def _facts(self) -> dict[str, Any]:
        one_batch = replace(self.workload, global_batch_size=self.machine.world_size)
        return {
            "machine": facts_of(self.machine),
            "libraries": package_versions(LIBRARIES),
            "allocator": self.machine.allocator,
            "workload": one_batch.fingerprint(),
        }

    @property
    def _file(self) -> Path:
        return cache_folder() / "steps" / f"{digest_of(self._facts, 16)}.json"

    def _stored(self) -> dict[str, tuple[float | None, float, float]]:
        """Empty if there is no file, or one that is damaged or of another machine."""
        try:
            content = json.loads(self._file.read_text(encoding="utf-8"))
            if content["facts"] != json.loads(json.dumps(self._facts)):
                return {}
            return {
                str(key): (None if micro is None else _positive(micro), _positive(last), float(at))
                for key, (micro, last, at) in content["steps"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}


def _positive(seconds: Any) -> float:
    """ValueError for what is no time."""
    if not 0 < float(seconds) < float("inf"):
        raise ValueError(seconds)
    return float(seconds)
