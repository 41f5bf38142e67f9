"""Loss parity: the winner trains as the plain rung does, or it is not the answer.

Both train a shallow model with the same weights on the same batch, again and again. Every loss after the first
has a whole optimizer step behind it: gradients that are reduced twice or not at all, states that get lost on their way
to the host, a step that is skipped, all show in how it falls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ladder.candidates import RUNGS_BY_NAME, Candidate, Engine
from ladder.events.protocol import MeasuredEvent, StepPolicy, TrialSpec
from ladder.events.trial_run import TrialRun
from ladder.workload.shapes import with_layers, with_vocabulary
from ladder.workload.workload import ModelShape

PLAIN = Engine(RUNGS_BY_NAME["zero1"])
"""What the others are held against. Measured on CPU ranks in bf16: all stages agree to the fourth digit, once stage 0
forgets a step that it only counted (`trial.model.forget_steps`), which is 1 to 3 % of the loss."""
_LAYERS = 2
"""Chosen: the fewest between which something can get lost, and the cheapest to train."""
_VOCABULARY = 32_768
"""Rows of the embeddings at most. Chosen: 150,000 alone, with their gradients and states, are more than a small GPU
holds."""
_TOKENS = 4096
"""Of a sequence at most: the plain rung has no room for a long one. Measured: one of 8,192 took 10 GiB."""
_STEPS = StepPolicy(warmup=2, minimum=2, maximum=2, seconds=600.0)
_TOLERANCE = 0.02
"""Of the first loss. Chosen: losses of engines that train alike agree to the fourth digit (measured, see `PLAIN`),
those of a wrong step differ by more."""

_FALLS = 2 * _TOLERANCE
"""The plain rung's losses fall by more: an engine that takes no step at all could not be told from it otherwise.
Derived: such an engine then differs by more than the tolerance."""


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Whether two engines' losses agree; None if that could not be found out."""

    agrees: bool | None
    sentence: str = ""


def as_parity_candidate(candidate: Candidate) -> Candidate:
    """`candidate` at micro-batch 1, so that the plain rung has room for it too."""
    return replace(candidate, micro_batch=1, accumulation=candidate.accumulation * candidate.micro_batch)


def as_plain(candidate: Candidate) -> Candidate:
    """What `candidate` is held against: the plain rung, with the candidate's numerics where those are other ones."""
    plain = replace(PLAIN, techniques=candidate.engine.numerics)
    return replace(as_parity_candidate(candidate), engine=plain, checkpoint_every=0, offload_activations=False)


def parity_trial(spec: TrialSpec, model: ModelShape, *, same_data: bool = False) -> TrialSpec:
    """`spec` as a trial of a few layers of `model` whose losses can be compared.

    With `same_data` all ranks train on one rank's sequences, as those that share them do.
    """
    shallow = with_vocabulary(with_layers(model, min(_LAYERS, model.num_layers)), _VOCABULARY)
    changes = {"model_config_json": dict(shallow.config), "steps": _STEPS, "parity": True, "stop_at": None}
    changes |= {"same_data": same_data, "seq_len": min(spec.seq_len, _TOKENS - _TOKENS % spec.world_size)}
    # No speed to beat, which is the real model's: what loses is not timed to the end, and losses are what is wanted.
    changes["candidates"] = tuple(each.model_copy(update={"beat_step_seconds": None}) for each in spec.candidates)
    if spec.optimizer == "sgd":  # whose steps are otherwise too short to be seen, or too long to be compared
        changes["deepspeed"] = spec.deepspeed | {"gradient_clipping": 1.0}
    return spec.model_copy(update=changes)


def losses_of(run: TrialRun) -> list[float]:
    """The losses that rank 0 saw, micro-step by micro-step; none if the trial did not come that far."""
    events = run.events[0] if run.events else []
    return next((event.losses for event in events if isinstance(event, MeasuredEvent)), [])


def compare(own: Sequence[float], plain: Sequence[float], engine: Engine, against: Engine = PLAIN) -> Parity:
    """Whether the losses of `engine` fall as those of `against`, the plain rung."""
    if not own or not plain:
        which = engine.key if not own else against.key
        return Parity(agrees=None, sentence=f"its losses were not compared: the shallow trial of {which} failed")
    if not plain[0] - min(plain) > _FALLS * abs(plain[0]):
        return Parity(agrees=None, sentence=f"its losses were not compared: those of {against.key} did not fall either")
    for step, (one, other) in enumerate(zip(own, plain, strict=False), start=1):
        if not abs(one - other) <= _TOLERANCE * abs(plain[0]):  # also true of NaN
            return Parity(
                agrees=False,
                sentence=f"its losses are not those of {against.key} on the same weights and data: "
                f"{one:.4f} instead of {other:.4f} in micro-step {step} of a shallow model",
            )
    return Parity(agrees=True)
