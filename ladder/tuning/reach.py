"""Candidates that count as not fitting although no measurement says so, and models that no trial is worth.

Some candidates are skipped because the host would run out of memory, and the kernel may then kill any process. Others
fitted when they were measured, but not in their proof. A model that is predicted to be far from fitting is refused
before the first trial; if the prediction may be wrong, it is tried.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ladder.candidates import Candidate
from ladder.errors import NothingFitsError
from ladder.events.outcome import Outcome, Record
from ladder.search.belief import Belief, believe
from ladder.search.relevance import most_host_bytes
from ladder.search.remedies import remedies
from ladder.search.space import REFUSED, Space, disproved
from ladder.text import shown
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


def less_disproved(records: Sequence[Record]) -> list[Record]:
    """`records` for a strategy: a failed proof replaces the measurement that it disproves."""
    failed = disproved(records)
    return [
        replace(failed.get(record.candidate_key, record), purpose=record.purpose)
        for record in records
        if not (record.purpose == "proof" and record.candidate_key in failed)
    ]


def refusals(candidates: Sequence[Candidate], trial: str, space: Space, records: Sequence[Record]) -> list[Record]:
    """A `host_oom` record under the name `trial` for each of `candidates` that is predicted to need more host memory
    than there is. The prediction is calibrated by `records`. Candidates within its error are tried: if host memory
    runs out, the kernel kills ranks first."""
    belief = believe(space, records)
    most = most_host_bytes(space)
    needs = {candidate: host_bytes(candidate, belief) for candidate in candidates}
    return [_refusal(candidate, needed, trial, space) for candidate, needed in needs.items() if needed > most]


def host_bytes(candidate: Candidate, belief: Belief) -> int:
    """Predicted host memory of all ranks together. CPU ranks have everything in host memory, up to their limit."""
    outlook, space = belief.outlook(candidate), belief.space
    return space.on_host(outlook.host, min(outlook.memory.peak, space.memory_limit))


def _refusal(candidate: Candidate, needed: int, trial: str, space: Space) -> Record:
    sentence = (
        f"refused without a trial: the ranks would need {format_bytes(needed)} of host memory, and they may use "
        f"{format_bytes(space.host_memory)} (--host-memory)"
    )
    outcome = Outcome(
        kind="host_oom", moment=REFUSED, sentence=sentence, bytes_asked=needed, bytes_free=space.host_memory
    )
    return Record(candidate_key=candidate.key, trial=trial, purpose="measure", outcome=outcome)
