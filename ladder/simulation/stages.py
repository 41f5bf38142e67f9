"""The stage of an assignment: DeepSpeed's or plain torch's."""

from __future__ import annotations

from ladder.simulation.allocation import Ledger
from ladder.simulation.assignment import Assignment
from ladder.simulation.plain_stages import Averaged, Sharded
from ladder.simulation.zero_stages import Divided, Partitioned, Replicated, Stage


def stage_of(assignment: Assignment, ledger: Ledger) -> Stage:
    """What `assignment` allocates beside activations."""
    if assignment.is_plain:
        return (Sharded if assignment.stage else Averaged)(assignment, ledger)
    kinds: dict[int, type[Stage]] = {0: Replicated, 3: Divided}
    return kinds.get(assignment.stage, Partitioned)(assignment, ledger)
