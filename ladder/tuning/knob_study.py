"""Optuna chooses settings of the winning engine's DeepSpeed knobs, with the constraint that a trial fits.

Nothing is stored here: before each question, a new study is told everything that the history holds.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial

from ladder.backends.registry import backend_of
from ladder.candidates import Candidate
from ladder.events.outcome import Record
from ladder.search.belief import LIKELY, believe
from ladder.search.decisions import Measure, Stop
from ladder.search.knobs import knobs_of, plain, turned, winner, with_knobs
from ladder.search.space import Space, measured

_STARTUP = 4
"""Random settings before the sampler uses what it was told. Chosen: a third of the twelve that are tried by default."""
_MOST_QUESTIONS = 50
"""How often the sampler is asked for a setting that is new and likely to fit. Chosen: if few are left it repeats
itself, and asking is cheap."""
_FEWEST_STEPS = 2
"""Steps that the winner's own speed is measured over before knobs are compared with it: one slow step would make every
setting look better. Chosen: the fewest that can disagree."""
_EXCESS = "excess"


def next_knobs(space: Space, records: Sequence[Record], num_trials: int) -> Measure | Stop:
    """The next setting of the winner's knobs to measure, until `num_trials` are; the same for the same history."""
    best = winner(space, records)
    if best is None:
        return Stop("nothing fits, so there is no engine whose knobs to try")
    choices = backend_of(best.engine.rung).knob_choices(space.workload, best.engine, space.world_size)
    with_knobs_so_far = (space.by_key[key] for key in turned(space, records))
    tried = [candidate for candidate in with_knobs_so_far if plain(candidate) == plain(best)]
    if len(tried) >= num_trials or not choices:
        return Stop(f"{len(tried)} settings of {best.engine.key}'s knobs were tried")
    if _is_unsure(best, records):
        reason = "more steps of the winner to compare settings of its knobs with"
        return Measure(best.engine, (best,), reason, precise=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # Optuna 4 calls constraints experimental; 5 needs a method that 4 does not have
        sampler = optuna.samplers.TPESampler(seed=len(tried), n_startup_trials=_STARTUP, constraints_func=_excess)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    distributions: dict[str, BaseDistribution] = {
        name: CategoricalDistribution(options) for name, options in choices.items()
    }
    seen, belief = measured(records), believe(space, records)
    for candidate in (best, *tried):
        study.enqueue_trial(knobs_of(space.workload, candidate.engine, space.world_size))
        _tell(study, study.ask(distributions), seen[candidate.key])
    for _ in range(_MOST_QUESTIONS):
        trial = study.ask(distributions)
        candidate = with_knobs(space.workload, best, trial.params, space.world_size)
        # A setting that is unlikely to fit is not tried: the possible gain is small.
        if candidate.key not in seen and belief.outlook(candidate).fits >= LIKELY:
            reason = f"knobs of the fastest candidate, {len(tried) + 1} of {num_trials}"
            return Measure(candidate.engine, (candidate,), reason, precise=True)
        _tell(study, trial, seen.get(candidate.key))
    return Stop(f"no other setting of {best.engine.key}'s knobs is likely to fit")


def _is_unsure(best: Candidate, records: Sequence[Record]) -> bool:
    """Whether `best` was timed only once and over too few steps."""
    own = [record for record in records if record.candidate_key == best.key and record.purpose == "measure"]
    return len(own) == 1 and own[0].measurement is not None and own[0].measurement.num_steps < _FEWEST_STEPS


def _tell(study: optuna.Study, trial: optuna.Trial, record: Record | None) -> None:
    """Tell the study the result of `trial`; without a record it counts as not fitting."""
    speed = record.tokens_per_second if record is not None else None
    trial.set_user_attr(_EXCESS, -1.0 if speed else 1.0)
    study.tell(trial, math.log(speed) if speed else 0.0)


def _excess(trial: FrozenTrial) -> Sequence[float]:
    """The constraint: above zero if a setting does not fit."""
    return [trial.user_attrs[_EXCESS]]
