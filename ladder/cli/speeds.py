"""The line of `ladder doctor` about the machine's speeds."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

from ladder.doctor.check import Check, fail, ok, parted, unseen, warn
from ladder.errors import LadderError
from ladder.machine.described import Gpu
from ladder.machine.known_machine import KnownMachine, facts_of, file_of, read_known
from ladder.machine.lease import Leases
from ladder.machine.machine import detect_machine
from ladder.options.tune import TuneOptions
from ladder.text import shown
from ladder.tuning.known import measure, measure_nodes
from ladder.tuning.venues import is_on_nodes
from ladder.tuning.venues.nodes import cluster_of

_NAME = "speeds"
_WORDS = {
    "flops": ("matrix products", 1e12, "TFLOP/s"),
    "device_bytes": ("device memory", 1e9, "GB/s"),
    "launch_seconds": ("a block's kernels are launched in", 1e-3, "ms"),
    "link_bytes": ("collectives in a node", 1e9, "GB/s"),
    "network_bytes": ("collectives between nodes", 1e9, "GB/s"),
    "pcie_bytes": ("pinned copies", 1e9, "GB/s"),
    "cpu_adam_parameters": ("CPU Adam", 1e9, "billion parameters/s"),
    "nvme_bytes": ("drive", 1e9, "GB/s"),
}
_MEASURE = "run `ladder doctor --measure`"


def speeds(*, measure_now: bool, options: TuneOptions) -> Iterator[Check]:
    """What is known of the machine's speeds; measures them first if `measure_now`.

    `options` name the GPUs (0: the CPU), and the nodes if there are several, which are known to be measured now.
    """
    try:
        if measure_now:
            yield from (_measured_nodes if is_on_nodes(options) else _measured)(options)
            return
        machine = detect_machine(gpus=options.gpus, gpu_memory=None, host_memory=None, nvme_path=None, choose=_all)
    except LadderError as error:
        yield (fail if measure_now else warn)(_NAME, *parted(str(error), "free the GPUs, and try again"))
        return
    known, ignored = read_known(facts_of(machine))
    if ignored:
        yield warn(_NAME, *parted(ignored, _MEASURE))
    elif known is None:
        yield unseen(_NAME, f"not measured, so tunes start from data sheets: {_MEASURE}, which takes seconds")
    else:
        yield ok(_NAME, _said(known), **_facts(known))


def _measured(options: TuneOptions) -> Iterator[Check]:
    with Leases() as leases:
        path = options.nvme_path.resolve() if options.nvme_path is not None else None
        machine = detect_machine(
            gpus=options.gpus, gpu_memory=None, host_memory=None, nvme_path=path, choose=leases.choose
        )
        measured = measure(machine)
    yield from _checks(*measured)


def _measured_nodes(options: TuneOptions) -> Iterator[Check]:
    with closing(cluster_of(options)) as cluster:
        machine = cluster.machine()
        count = machine.world_size // machine.num_nodes
        names = ", ".join(map(shown, cluster.names))
        yield ok("nodes", f"{names}, with {count} rank{'s' * (count != 1)} each", nodes=len(cluster.names))
        measured = measure_nodes(machine, cluster)
    yield from _checks(*measured)


def _checks(known: KnownMachine, failed: Mapping[str, str], kept: bool) -> Iterator[Check]:
    for name, reason in failed.items():
        yield warn(f"{_NAME}: {name}", f"not measured ({shown(reason)})", "see the other checks, and measure again")
    if kept:
        yield ok(_NAME, _said(known), **_facts(known))
    else:
        fix = "make its folder writable, or set LADDER_CACHE to one that is"
        yield warn(_NAME, f"{_said(known)}; {shown(file_of(known.facts))} cannot be written", fix, **_facts(known))


def _all(visible: Sequence[Gpu], count: int, _needed: int | None) -> Sequence[Gpu]:
    """To look up what is known, GPUs need not be free."""
    return visible[:count]


def _said(known: KnownMachine) -> str:
    parts = []
    for name, (what, unit, word) in _WORDS.items():
        if name in known.rates:
            parts.append(f"{what} {known.rates[name] / unit:.3g} {word}")
    when = "only tunes taught something about it"
    if known.measured_at is not None:
        day = datetime.datetime.fromtimestamp(known.measured_at).date()
        when = f"measured on {day}: {', '.join(parts)}"
    tunes = len(known.tunes)
    return f"{when}; corrected by {tunes} tune{'s' * (tunes != 1)} since" if tunes else when


def _facts(known: KnownMachine) -> dict[str, object]:
    return {"machine": known.facts, "rates": known.rates, "points": known.points, "learned": known.learned}
