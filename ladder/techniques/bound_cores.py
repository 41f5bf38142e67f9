"""Bound cores: each rank runs on CPU cores of its own, as with DeepSpeed's `--bind_cores_to_rank`."""

from __future__ import annotations

from collections.abc import Sequence

from ladder.candidates import Consent, Problem, Rung, Technique

_DOUBT = 0.1
"""Of the seconds of a step, as a logarithm. Chosen: nothing was measured on a GPU; a report for two sockets has 0.77 of
the step's time."""


class BoundCores(Technique):
    name = "bind-cores"
    title = "ranks bound to cores"
    slot = "host"
    consent = Consent(
        caution="each rank runs on cores of its own (--allow bind-cores): ladder's launch script binds them with "
        "taskset, and other launchers do not"
    )
    rank_module = "ladder.trial.techniques.bound_cores"
    through = "model"
    why_not = "cores are divided between several ranks of a host where something is offloaded, and each rank needs one"
    binds_cores = True
    time_doubt = _DOUBT

    def suits(self, problem: Problem, rung: Rung) -> bool:
        """Where the host works: with offload, or without a GPU."""
        is_on_host = bool(rung.devices) or problem.device == "cpu"
        return is_on_host and problem.num_cores >= problem.world_size > 1

    def cores_of_ranks(self, cores: Sequence[int], ranks: int) -> list[list[int]]:
        """As many neighbouring ones for each."""
        each = max(1, len(cores) // ranks)
        return [sorted(cores[each * rank : each * (rank + 1)] or cores[-1:]) for rank in range(ranks)]


BIND_CORES = BoundCores()
