"""Loss parity: the winner must train like a plain ZeRO stage 1, or it is not the answer.

Both train a shallow model with the same weights, again and again on the same batch. Each loss after the first follows
an optimizer step. Gradients that are reduced twice or not at all, states that are lost on their way to the host and
skipped steps all change how the loss falls. Each engine is compared once: not again where an earlier tune here did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from ladder.backends.registry import REFERENCE
from ladder.candidates import Candidate, Engine
from ladder.events.protocol import MeasuredEvent, TrialSpec
from ladder.events.step_policy import StepPolicy
from ladder.events.trial_run import TrialRun
from ladder.machine.cache import cache_folder, keep
from ladder.machine.described import Machine
from ladder.machine.known_machine import facts_of
from ladder.machine.versions import package_versions
from ladder.optimizers.registry import OPTIMIZERS
from ladder.techniques.registry import TECHNIQUES
from ladder.text import digest_of
from ladder.tuning.tune_events import Note, Subscriber
from ladder.workload.shapes import with_layers, with_vocabulary
from ladder.workload.workload import ModelShape

_LAYERS = 2
"""Layers of the shallow model. Chosen: with two, an error between layers shows, and training is cheap."""
_VOCABULARY = 32_768
"""The most rows of the embeddings. Chosen: 150,000, with their gradients and states, exceed a small GPU's memory."""
_TOKENS = 4096
"""The most tokens of a sequence: the reference engine has no memory for a long one. Measured: 8,192 took 10 GiB."""
_MICRO_STEPS = 2
"""The most in an optimizer step. Chosen: with two, gradients accumulate. Without this limit, a trial of an engine whose
first micro-step differs would have three, and one of the reference engine two: their losses could not be compared."""
_STEPS = StepPolicy(warmup=2, minimum=2, maximum=2, seconds=600.0)
_STEPS_OF_ADAPTERS = replace(_STEPS, minimum=8, maximum=8)
"""Chosen: the losses of adapters on two matrices fell by less than `_FALLS` in four steps."""
_TOLERANCE = 0.02
"""How much losses may differ, as a fraction of the first. Chosen: losses of correct engines agree to four digits
(measured, see `REFERENCE`), and a wrong step makes a larger difference. A technique may allow more."""

_HALF = 0.5
"""Below this share of the first loss, those of an engine that may differ more are compared no further. Chosen: two
layers then learn their batch by heart, and losses swing: on a CPU, those of FP8 differed from 16 bits by at most 1.6 %
of the first until then, and by 13 % later (measured, benchmarks/fp8_losses.py)."""

_FALLS = 0.01
"""How much the reference engine's losses must fall at least, as a fraction of the first: otherwise an engine that takes
no step would look the same. Chosen: fifty times what correct engines differ by; adapters of rank 4 fall by 0.02
(measured)."""


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Whether the losses of two engines agree; None if they could not be compared."""

    agrees: bool | None
    sentence: str = ""


def as_parity_candidate(candidate: Candidate) -> Candidate:
    """`candidate` with micro-batch 1, which fits with the reference engine too, and as many micro-steps as that has."""
    sequences = candidate.accumulation * candidate.micro_batch
    return replace(candidate, micro_batch=1, accumulation=min(_MICRO_STEPS, sequences))


def as_reference(candidate: Candidate, reference: Engine = REFERENCE) -> Candidate:
    """What `candidate` is compared with: the reference engine, with the techniques that change the numerics."""
    plain = replace(reference, techniques=candidate.engine.numerics)
    return replace(as_parity_candidate(candidate), engine=plain, checkpoint_every=0, offload_activations=False)


def parity_trial(spec: TrialSpec, model: ModelShape, *, same_data: bool = False) -> TrialSpec:
    """`spec` as a trial of a few layers of `model` whose losses can be compared.

    With `same_data` all ranks train on the same sequences, as with sequence parallelism.
    """
    shallow = with_vocabulary(with_layers(model, min(_LAYERS, model.num_layers)), _VOCABULARY)
    changes: dict[str, Any] = {
        "model_config_json": dict(shallow.config),
        "steps": _STEPS if spec.lora is None else _STEPS_OF_ADAPTERS,
        "parity": True,
        "stop_at": None,
        "script": None,
        "freeze": (),  # the names are those of the whole model
        "lora": {**spec.lora, "lora_dropout": 0.0} if spec.lora is not None else None,
    }
    changes |= {"same_data": same_data, "seq_len": min(spec.seq_len, _TOKENS - _TOKENS % spec.world_size)}
    # Without a speed to beat: slow candidates would be timed for fewer steps, and all losses are needed.
    changes["candidates"] = tuple(replace(each, beat_step_seconds=None) for each in spec.candidates)
    if (clipping := OPTIMIZERS[spec.optimizer].clipping_of_comparison) is not None:
        changes["deepspeed"] = spec.deepspeed | {"gradient_clipping": clipping}
    return replace(spec, **changes)


def losses_of(run: TrialRun) -> list[float]:
    """The losses of rank 0 by micro-step; empty if the trial did not get that far."""
    events = run.events[0] if run.events else []
    return next((event.losses for event in events if isinstance(event, MeasuredEvent)), [])


def compare(own: Sequence[float], plain: Sequence[float], engine: Engine, against: Engine = REFERENCE) -> Parity:
    """Whether the losses of `engine` fall like those of `against`, the reference engine."""
    if not own or not plain:
        which = engine.key if not own else against.key
        return Parity(agrees=None, sentence=f"its losses were not compared: the shallow trial of {which} failed")
    if not plain[0] - min(plain) > _FALLS * abs(plain[0]):
        return Parity(agrees=None, sentence=f"its losses were not compared: those of {against.key} did not fall")
    tolerance = max((technique.loss_tolerance for technique in engine.techniques), default=0.0)
    if tolerance:
        plain = _until_half(plain)
    # At most half of the fall, so that an engine that takes no step always differs by more.
    most = min(max(_TOLERANCE, tolerance) * abs(plain[0]), (plain[0] - min(plain)) / 2)
    for step, (one, other) in enumerate(zip(own, plain, strict=False), start=1):
        if not abs(one - other) <= most:  # also true of NaN
            return Parity(
                agrees=False,
                sentence=f"its losses differ from those of {against.key} with the same weights and data: "
                f"{one:.4f} instead of {other:.4f} in micro-step {step} of a shallow model",
            )
    return Parity(agrees=True)


def _until_half(losses: Sequence[float]) -> Sequence[float]:
    """Up to the first that is below half of the first, which shows what a step from above it did."""
    below = (step for step, loss in enumerate(losses, start=1) if loss < _HALF * losses[0])
    return losses[: next(below, len(losses))]


LIBRARIES = (
    "bitsandbytes",
    "peft",
    "triton",
    *(library.distribution for technique in TECHNIQUES.values() for library in technique.libraries),
)
"""Beside those that every answer names: they compute in some trials."""
_OF_ONE_TUNE = {"trial", "folder", "gpu_uuids", "memory_limit", "save_folder", "stop_at"}
"""What a trial's losses do not depend on."""


@dataclass(frozen=True, kw_only=True)
class Agreements:
    """Those on one machine. Where they cannot be read or written, nothing is known of any."""

    machine: Machine

    def have(self, specs: Sequence[TrialSpec]) -> bool:
        """Whether the losses of trials like these agreed."""
        return self._is_of_one_host and self._file_of(specs).exists()

    def add(self, specs: Sequence[TrialSpec], losses: Sequence[Sequence[float]]) -> None:
        """Keep that they do, with the losses of each."""
        if self._is_of_one_host:
            keep(self._file_of(specs), {**self._facts, "losses": losses})

    @property
    def _is_of_one_host(self) -> bool:
        """Nothing is known of the libraries on other nodes."""
        return self.machine.num_nodes == 1

    @property
    def _facts(self) -> dict[str, Any]:
        return {"machine": facts_of(self.machine), "libraries": package_versions(LIBRARIES)}

    def _file_of(self, specs: Sequence[TrialSpec]) -> Path:
        trained = [{name: each for name, each in asdict(spec).items() if name not in _OF_ONE_TUNE} for spec in specs]
        return cache_folder() / "losses" / f"{digest_of({**self._facts, 'trials': trained}, 16)}.json"


class ShallowTrials(Protocol):
    """What runs the trials."""

    def shallow_trial(self, candidate: Candidate, same_data: bool) -> TrialSpec: ...

    def losses(self, candidate: Candidate, same_data: bool) -> list[float]: ...


@dataclass(kw_only=True, eq=False)
class Comparisons:
    """Those of one tune, whose tuners share them."""

    agreements: Agreements | None = None
    """Without it, every comparison is made."""
    reference: Engine = REFERENCE
    _reference: dict[tuple[str, bool], list[float]] = field(default_factory=dict)
    """Losses of reference engines, by the candidate's key and whether all ranks had the same data."""
    _agreed: set[Engine] = field(default_factory=set)
    """The engines whose losses agreed in this tune."""

    @property
    def has_reference(self) -> bool:
        """Whether the next comparison needs one trial and not two."""
        return bool(self._reference)

    def of(self, candidate: Candidate, trials: ShallowTrials, tell: Subscriber) -> Parity:
        """Whether the losses of `candidate` fall like those of what it is compared with."""
        own, plain = as_parity_candidate(candidate), as_reference(candidate, self.reference)
        if own == plain:
            return Parity(agrees=True)
        same_data = own.engine.shares_sequences
        specs = [trials.shallow_trial(each, same_data) for each in (own, plain)]
        if self.agreements is not None and self.agreements.have(specs):
            if own.engine not in self._agreed:
                tell(Note(f"The losses of {own.engine.key} and {plain.engine.key} agreed in an earlier tune here."))
            return Parity(agrees=True)
        against = plain.key, same_data
        losses = trials.losses(own, same_data)  # first, as it may run in the processes of the trial before
        if losses and not self._reference.get(against):
            self._reference[against] = trials.losses(plain, same_data)
        reference = self._reference.get(against, [])
        parity = compare(losses, reference, candidate.engine, plain.engine)
        if parity.agrees and self.agreements is not None:
            self.agreements.add(specs, (losses, reference))
            self._agreed.add(own.engine)
        return parity
