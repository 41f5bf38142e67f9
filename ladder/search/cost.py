"""The cost of a trial in seconds: the start of an engine, and the untimed and timed steps of its candidates."""

from __future__ import annotations

from collections.abc import Sequence

from ladder.backends.registry import REFERENCE
from ladder.candidates import Candidate, Rung
from ladder.search.belief import Outlook
from ladder.workload.workload import Workload

PROCESSES = 2.5
"""Fork, process group, and the end of all ranks until their memory is free (measured: 1.5 to 3.5 s on four GPUs)."""
_TIMED = 3
"""Timed optimizer steps of a candidate, after an untimed one. Chosen: the usual case of `StepPolicy`, until the median
is known to 1 %."""
_STEP_SECONDS = 4.0
"""After this time, only the fewest steps are timed. Derived: `StepPolicy.seconds`."""
_FEWEST_TIMED = 2
"""The fewest of them; one less for long steps if the untimed one agrees. Derived from `StepPolicy`."""
PROOF_STEPS, PROOF_SECONDS = 3, 30.0
"""A proof is timed for at least this many optimizer steps, and for this long unless its speed is certain sooner.
Chosen: one disturbed step does not change the median of three; a user will wait half a minute for a final figure."""
_MOST_STEPS = 12
"""Steps after which timing ends in any case. Derived: `StepPolicy.maximum`."""
_WARM_UP = 2
"""Untimed optimizer steps of a first candidate. Derived: `StepPolicy.warmup`."""
_LONG_SECONDS = 3.0
"""But a proof has only one that takes this long. Derived: `StepPolicy.long_seconds`."""
_SUSTAINED_SECONDS, _PROVEN_SECONDS = 1.0, 10.0
"""A timed step of an engine whose optimizer is not on the GPU accumulates at least this long before it, in a trial and
in a proof. Chosen: a GPU that rests often has higher clocks than its power limit lets it keep. Measured: micro-steps of
Llama-3.2-1B on an H200 take 7 % longer in whole steps of 8 s than in pairs of 0.3 s, and trainings on two hosts were 2
and 6 % slower than proofs that accumulated for 1 s (benchmarks/results/compare). So a proof makes such whole steps."""
COMPARISONS = 2
"""Trials that compare losses before a proof: one of the answer, one of the engine that it is compared with. Derived:
`tuning.parity`."""
SCRIPT_STEPS, GENERATING_STEPS, SCRIPT_SECONDS = 8, 3, 10.0
"""The same of the proof of a user's script, and of one that generates what it trains on. Chosen: batches of a script
differ, and only many of them show the average; a generation takes long, and is an average already."""
_SCRIPT_UNTIMED, _SETTLING = (3, 2.0), 45.0
"""Steps before them and their seconds at least, and the most seconds where steps generate. Derived:
`trial.script.real_steps`."""
_COMPARED_LAYERS, _COMPARED_STEPS = 2, 4
"""Of a trial that compares losses. Derived: `tuning.parity`."""
CANDIDATES_OF_A_TRIAL = 3
"""Derived: the most that `auto` puts into a trial (`_MOST`)."""
MOST_TRIALS = 5
"""The trials that the search needs in nearly all cases (measured: benchmarks/search.py)."""


def start_seconds(rung: Rung, num_parameters: int, num_trained: int | None = None) -> float:
    """Seconds of a trial before its first step and for its end; `num_trained` of the parameters are, None for all.

    Measured on four H200 with 0.7 to 6.7 billion parameters: model and engine take 2.4 to 5.3 s without offload, 5 s
    plus 2.2 to 2.8 s per billion with the optimizer on the host, 7 s plus 6 s per billion with everything on NVMe. Of
    this, DeepSpeed's imports were 1.1 to 2.5 s, which trials leave out since: 1.0 s is left for Llama-3.2-1B, and 3.9 s
    for FSDP2, of whose weights rank 0 draws all (measured on two H100; benchmarks/results/time-to-answer). An offloaded
    optimizer holds what is trained alone; parameters on NVMe are 2 of 14 bytes (derived).
    """
    billions = num_parameters / 1e9
    trained = billions if num_trained is None else num_trained / 1e9
    seconds = PROCESSES + 0.5 + 0.4 * billions
    if rung.offload_optimizer == "cpu":
        seconds += 3.0 + 2.2 * trained
    if rung.offload_param == "cpu":
        seconds += 0.3 + 0.3 * billions
    if "nvme" in rung.devices:
        seconds += 5.0 + 5.5 * trained
    if rung.offload_param == "nvme":
        seconds += 5.5 * 2 / 14 * (billions - trained)
    return seconds


def start_of(candidate: Candidate, workload: Workload) -> float:
    """`start_seconds` of a trial that begins with `candidate`, and those of a user's script before it trains."""
    weights, script = workload.weights, workload.script
    own = script.facts.preparation_seconds if script is not None else 0.0
    return own + start_seconds(candidate.engine.rung, weights.total, weights.trained)


def sustained_seconds(rung: Rung, device: str, *, proving: bool) -> float:
    """How long a timed step accumulates at least before the optimizer, if the training's do: long only on GPUs."""
    if device != "cuda" or rung.offload_optimizer == "none":
        return 0.0
    return _PROVEN_SECONDS if proving else _SUSTAINED_SECONDS


def short_step(outlook: Outlook) -> float:
    """Seconds of an untimed step, which has at most two micro-steps in a trial."""
    return outlook.speed.step_seconds(min(2, outlook.candidate.accumulation))


def timed_step(outlook: Outlook, *, proving: bool = False) -> float:
    """Seconds of a timed step of a trial, or a proof, which may accumulate longer."""
    candidate, speed, device = outlook.candidate, outlook.speed, outlook.belief.space.device
    sustained = 0.0 if outlook.shallow else sustained_seconds(candidate.engine.rung, device, proving=proving)
    micro = speed.accumulate_seconds
    return short_step(outlook) + max(0.0, min(sustained - micro, (candidate.accumulation - 2) * micro))


def candidate_seconds(outlook: Outlook) -> float:
    """Seconds for the untimed step and the timed steps of a candidate."""
    step = timed_step(outlook)
    return short_step(outlook) + max(_FEWEST_TIMED * step, min(_TIMED * step, _STEP_SECONDS))


def expected_seconds(outlooks: Sequence[Outlook]) -> float:
    """Seconds of one trial that measures these candidates, all of one engine."""
    first = outlooks[0]
    start = start_of(first.candidate, first.workload)
    start += short_step(first)  # it has one more untimed step
    return start + sum(map(candidate_seconds, outlooks))


def usual_seconds(outlook: Outlook) -> float:
    """Seconds of a trial of an engine with as many candidates as usual, if each takes as long as this one."""
    start = start_of(outlook.candidate, outlook.workload)
    return start + CANDIDATES_OF_A_TRIAL * candidate_seconds(outlook)


def proof_seconds(outlook: Outlook) -> tuple[float, float]:
    """The least and most seconds of a proof: the start, timed steps until its speed is certain, and an evaluation."""
    if outlook.workload.script is not None:
        return _script_proof_seconds(outlook, generates=outlook.workload.script.facts.generation is not None)
    untimed, step = short_step(outlook), timed_step(outlook, proving=True)
    fewest = PROOF_STEPS * step
    before = untimed if untimed >= _LONG_SECONDS else _WARM_UP * untimed
    around = start_of(outlook.candidate, outlook.workload) + before + untimed
    return around + fewest, around + max(fewest, min(_MOST_STEPS * step, PROOF_SECONDS + step))


def _script_proof_seconds(outlook: Outlook, *, generates: bool) -> tuple[float, float]:
    """The same in a script's own loop, which makes whole optimizer steps."""
    step = outlook.speed.step_seconds(outlook.candidate.accumulation)
    start = start_of(outlook.candidate, outlook.workload)
    fewest = (GENERATING_STEPS if generates else SCRIPT_STEPS) * step
    untimed = max(_SCRIPT_UNTIMED[0] * step, _SCRIPT_UNTIMED[1])
    longest = max(untimed, _SETTLING) if generates else untimed
    return start + untimed + fewest, start + longest + max(fewest, SCRIPT_SECONDS + step)


def comparison_seconds(outlook: Outlook) -> float:
    """Seconds of one trial of a few layers; 0 if the candidate is itself the one that others are compared with."""
    candidate, model, weights = outlook.candidate, outlook.workload.model, outlook.workload.weights
    if candidate.engine.name == REFERENCE.name and candidate.checkpoint_every == 0:
        return 0.0
    share = min(1.0, _COMPARED_LAYERS / model.num_layers)
    step = short_step(outlook) * share
    start = start_seconds(candidate.engine.rung, int(weights.total * share), int(weights.trained * share))
    return start + _COMPARED_STEPS * step
