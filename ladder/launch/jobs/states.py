"""The states of a Slurm job, and what they mean in words."""

from __future__ import annotations

GONE = "GONE"
"""Our own word: Slurm knows the job no more."""
_WORDS = {
    "TIMEOUT": "its time limit was reached",
    "DEADLINE": "its deadline was reached",
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node did not boot",
    "CANCELLED": "somebody cancelled it",
    "PREEMPTED": "a job of higher priority took its place",
    "OUT_OF_MEMORY": "it used more host memory than it had asked for",
    "REVOKED": "another cluster took it",
    GONE: "Slurm knows it no more",
}
_ENDED = (*_WORDS, "COMPLETED", "FAILED")
NEVER = frozenset(
    {
        *("BadConstraints", "PartitionNodeLimit", "PartitionTimeLimit", "InvalidAccount", "InvalidQOS"),
        *("AccountNotAllowed", "QOSNotAllowed", "JobHeldAdmin", "DependencyNeverSatisfied", "ReservationDeleted"),
    }
)
"""Reasons for which a job waits and never starts, unless somebody changes it or the cluster."""


def is_over(state: str) -> bool:
    """Whether a job in `state`, as squeue calls it, never runs again: these jobs are not queued again."""
    return state in _ENDED


def why_it_ended(state: str) -> str:
    """Why Slurm ended a job, in words."""
    return _WORDS.get(state, f"Slurm says {state}")
