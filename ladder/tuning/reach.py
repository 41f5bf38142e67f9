"""Before the first trial: refuses a model that is so far from fitting that no trial is worth its time.

If the prediction may be wrong, a model is tried even if it is predicted not to fit.
"""

from __future__ import annotations

from collections.abc import Collection

from ladder.candidates import Candidate
from ladder.errors import NothingFitsError
from ladder.search.belief import Belief, believe
from ladder.search.relevance import most_host_bytes
from ladder.search.remedies import remedies
from ladder.search.space import Space
from ladder.text import shown
from ladder.tuning.refusal import host_bytes
from ladder.units import format_bytes

FAR = {"cuda": 1.5, "cpu": 2.0}
"""A candidate is far from fitting if its predicted peak is more than this many times the limit.

Chosen: in the recorded sweeps on GPUs no prediction made before the first trial was off by more than 15 %, so 1.5
allows three times the worst error. On a CPU the memory model is less than half as certain.
"""
_PAPER_MACHINE = "a100-80"


def require_within_reach(space: Space, unsupported: Collection[str], *, asked_for_cpu: bool) -> None:
    """NothingFitsError, with what would fit, if every candidate of `space` is predicted to be far from fitting.

    `unsupported` names the rungs that are missing from the space. `asked_for_cpu` says that the user chose CPU ranks;
    otherwise ranks run on the CPU because no GPU is visible.
    """
    belief = believe(space, ())
    if not space.candidates or any(not _is_far(candidate, belief) for candidate in space.candidates):
        return
    frugal = min(space.candidates, key=space.predicted_peak)
    needed, limit = space.predicted_peak(frugal), space.memory_limit
    times = FAR[space.device]
    predicted = f"even {frugal.key} is predicted to need {format_bytes(needed)}"
    if needed <= times * limit:  # then it is the host that is too small
        host = format_bytes(belief.outlook(frugal).host)
        predicted = f"{frugal.key} is predicted to need {host} of host memory, of {format_bytes(space.host_memory)}"
    of_each = "CPU rank" if space.device == "cpu" else "GPU"
    raise NothingFitsError(
        f"{_why_cpu(space, asked_for_cpu)}Nothing is predicted to fit in {format_bytes(limit)} per {of_each}: "
        f"{predicted}. No candidate is within {times:g} times its limit, so no trial was started. "
        f"{_what_would(space, unsupported, asked_for_cpu)}"
    )


def _is_far(candidate: Candidate, belief: Belief) -> bool:
    space = belief.space
    if space.predicted_peak(candidate) > FAR[space.device] * space.memory_limit:
        return True
    return host_bytes(candidate, belief) > most_host_bytes(space)  # the tune would skip it without a trial


def _why_cpu(space: Space, asked_for_cpu: bool) -> str:
    if space.device != "cpu":
        return ""
    ranks = f"{space.world_size} CPU ranks"
    if asked_for_cpu:
        return f"--gpus 0 asks for {ranks}. "
    return f"No GPU is visible (`ladder doctor` says why), so the model would train on {ranks}. "


def _what_would(space: Space, unsupported: Collection[str], asked_for_cpu: bool) -> str:
    found = remedies(space, (), unsupported).sentence(on_cpu=space.device == "cpu")
    if space.device != "cpu":
        return found or "Use more or larger GPUs."
    model = shown(space.workload.model.name)
    on_gpus = "leave out --gpus 0 on a machine with GPUs" if asked_for_cpu else "start it on a machine with GPUs"
    return (
        f"{found} {on_gpus[0].upper()}{on_gpus[1:]}, or tune for a simulated machine: "
        f"`ladder tune {model} --launcher simulated --machine {_PAPER_MACHINE}`."
    ).lstrip()
