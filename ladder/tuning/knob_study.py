"""Optuna turns the knobs of the winning engine, by ask-and-tell; that a trial fits is a constraint.

There is no state here: the study is told everything that the history holds before each question.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial

from ladder.candidates import Candidate
from ladder.events.outcome import Record
from ladder.search.belief import LIKELY, believe
from ladder.search.decisions import Measure, Stop
from ladder.search.knobs import knob_choices, knobs_of, plain, turned, winner, with_knobs
from ladder.search.space import Space, measured

_STARTUP = 4
"""Settings at random before the sampler builds on what it was told. Chosen: a third of the twelve that are tried by
default."""
_MOST_QUESTIONS = 50
"""The sampler is asked so often for a setting that is new and likely to fit. Chosen: where few are left it names the
same ones again, and asking is cheap."""
_FEWEST_STEPS = 2
"""A gain over one step alone may be that step's bad luck, and all settings would have it. Chosen: the fewest that can
disagree."""
_EXCESS = "excess"


def next_knobs(space: Space, records: Sequence[Record], num_trials: int) -> Measure | Stop:
    """The next setting of the winner's knobs to measure, until `num_trials` were; the same for the same history."""
    best = winner(space, records)
    if best is None:
        return Stop("nothing fits whose knobs could be turned")
    choices = knob_choices(space.workload, best.engine)
    with_knobs_so_far = (space.by_key[key] for key in turned(space, records))
    tried = [candidate for candidate in with_knobs_so_far if plain(candidate) == plain(best)]
    if len(tried) >= num_trials or not choices:
        return Stop(f"{len(tried)} settings of {best.engine.key}'s knobs were tried")
    if _is_unsure(best, records):
        return Measure(best.engine, (best,), "what its knobs gain is held against more than one step", precise=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna 4 calls constraints experimental; 5 wants a method that 4 has not
        sampler = optuna.samplers.TPESampler(seed=len(tried), n_startup_trials=_STARTUP, constraints_func=_excess)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    distributions: dict[str, BaseDistribution] = {
        name: CategoricalDistribution(options) for name, options in choices.items()
    }
    seen, belief = measured(records), believe(space, records)
    for candidate in (best, *tried):
        study.enqueue_trial(knobs_of(space.workload, candidate.engine))
        _tell(study, study.ask(distributions), seen[candidate.key])
    for _ in range(_MOST_QUESTIONS):
        trial = study.ask(distributions)
        candidate = with_knobs(space.workload, best, trial.params)
        # What hardly fits is not tried: the winner fits, and what is sought is a little speed.
        if candidate.key not in seen and belief.outlook(candidate).fits >= LIKELY:
            reason = f"knobs of the fastest candidate, {len(tried) + 1} of {num_trials}"
            return Measure(candidate.engine, (candidate,), reason, precise=True)
        _tell(study, trial, seen.get(candidate.key))
    return Stop(f"no other setting of {best.engine.key}'s knobs is likely to fit")


def _is_unsure(best: Candidate, records: Sequence[Record]) -> bool:
    """Whether `best` was timed once only, and over too few steps."""
    own = [record for record in records if record.candidate_key == best.key and record.purpose == "measure"]
    return len(own) == 1 and own[0].measurement is not None and own[0].measurement.num_steps < _FEWEST_STEPS


def _tell(study: optuna.Study, trial: optuna.Trial, record: Record | None) -> None:
    """What became of `trial`; without a record it is not believed to fit."""
    speed = record.tokens_per_second if record is not None else None
    trial.set_user_attr(_EXCESS, -1.0 if speed else 1.0)
    study.tell(trial, math.log(speed) if speed else 0.0)


def _excess(trial: FrozenTrial) -> Sequence[float]:
    """The constraint: above zero where a setting does not fit."""
    return [trial.user_attrs[_EXCESS]]
