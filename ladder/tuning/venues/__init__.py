"""Where a tune's trials run, and everything that differs between places: this host, nodes, or a machine on paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ladder.errors import UsageError
from ladder.machine.lease import Leases
from ladder.tuning.tune_events import Subscriber
from ladder.tuning.venues.base import Venue
from ladder.tuning.venues.here import ThisHost

if TYPE_CHECKING:
    from ladder.options.tune import TuneOptions


def venue_of(options: TuneOptions, leases: Leases, tell: Subscriber, cancelled: Callable[[], bool]) -> Venue:
    """The machine of `--launcher simulated --machine`, or this host.

    UsageError if one is given without the other, or if an option has no effect on a simulated machine.
    """
    if options.launcher == "simulated":
        from ladder.tuning.venues.paper import OnPaper, paper_machine  # only a simulated tune waits for this import

        return OnPaper(paper_machine(options), options, tell, cancelled)
    if options.machine is not None:
        raise UsageError("--machine names a simulated machine: add --launcher simulated, or leave it out.")
    if is_on_nodes(options):
        from ladder.tuning.venues.nodes import OnNodes  # only a tune on nodes waits for this import

        return OnNodes(options, leases, tell, cancelled)
    return ThisHost(options, leases, tell, cancelled)


def is_on_nodes(options: TuneOptions) -> bool:
    """Whether agents on nodes run the trials, which may be one node."""
    return options.launcher == "ray" or options.hostfile is not None or (options.nodes or 1) > 1
