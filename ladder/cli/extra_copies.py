"""`srun --ntasks=8 ladder tune …` starts eight copies of ladder, and ladder starts the ranks itself: one copy works."""

from __future__ import annotations

from collections.abc import Mapping

_LAST_STEP = 0xFFFF_0000
"""Defined by Slurm, rounded down: higher numbers stand for the batch script, an interactive shell and other steps that
`srun` did not start."""


def said_to_extra_copy(environment: Mapping[str, str], *, of_each_node: bool = False) -> str | None:
    """Why this copy has nothing to do, in one sentence; None for the first or only copy.

    With `of_each_node`, the first copy on each node has something to do. Only a task of a step counts: a batch script
    of a job with eight tasks is one process. Processes that a copy starts inherit the variables, but none of them asks.
    """
    step = environment.get("SLURM_STEP_ID", "")
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "")
    rank = environment.get("SLURM_LOCALID" if of_each_node else "SLURM_PROCID", "")
    # str.isdigit alone also holds for digits that int() refuses.
    if not all(text.isascii() and text.isdigit() for text in (step, tasks, rank)):
        return None
    if int(step) >= _LAST_STEP or int(tasks) <= 1 or int(rank) == 0:
        return None
    return (
        f"this is copy {int(rank) + 1} of {tasks} that srun started; ladder starts the ranks itself and only the first "
        "copy works, so use srun --ntasks=1."
    )
