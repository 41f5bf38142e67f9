"""Which settings of the winning engine's DeepSpeed knobs to try: one that is in doubt, and then what Optuna chooses.

Optuna's constraint is that a trial fits. Nothing is stored here: before each question, a new study is told everything
that the history holds.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial

from ladder.backends.base import Choices
from ladder.backends.registry import backend_of
from ladder.candidates import Candidate
from ladder.events.outcome import Record
from ladder.search.belief import LIKELY, Belief, believe
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
_HOPELESS = 0.9
"""Predicted speed, as a share of the winner's, below which a knob in doubt is left as it is. Chosen: the formulas know
what our default gains, and not what it costs: 4 to 19 % of a step (see `knobs_in_doubt`), most for the smallest model.
"""
_EXCESS = "excess"


def next_knobs(space: Space, records: Sequence[Record], num_trials: int | None) -> Measure | Stop:
    """The next setting of the winner's knobs to measure, until `num_trials` are; the same for the same history.

    The first is the one for which our default is in doubt, if there is one; it is the only one without a number.
    """
    best = winner(space, records)
    if best is None:
        return Stop("nothing fits, so there is no engine whose knobs to try")
    with_knobs_so_far = (space.by_key[key] for key in turned(space, records))
    tried = [candidate for candidate in with_knobs_so_far if plain(candidate) == plain(best)]
    chosen = _in_doubt(space, records, best)
    most = len(tried) + (chosen is not None) if num_trials is None else num_trials
    choices = backend_of(best.engine.rung).knob_choices(space.workload, best.engine, space.world_size)
    if len(tried) >= most or not choices:
        return Stop(f"{len(tried)} settings of {best.engine.key}'s knobs were tried")
    if _is_unsure(best, records):
        reason = "more steps of the winner to compare settings of its knobs with"
        return Measure(best.engine, (best,), reason, precise=True)
    chosen = chosen or _sampled(space, records, choices, (best, *tried))
    if chosen is None:
        return Stop(f"no other setting of {best.engine.key}'s knobs is likely to fit")
    reason = f"knobs of the fastest candidate, {len(tried) + 1} of {most}"
    return Measure(chosen.engine, (chosen,), reason, precise=True)


def _in_doubt(space: Space, records: Sequence[Record], best: Candidate) -> Candidate | None:
    """`best` with the other choice where our default is in doubt; None once measured, or where that has no chance."""
    others = backend_of(best.engine.rung).knobs_in_doubt(best, space.world_size, space.device)
    if not others:
        return None
    usual = knobs_of(space.workload, best.engine, space.world_size)
    candidate = with_knobs(space.workload, best, {**usual, **others}, space.world_size)
    belief = believe(space, records)
    if not _is_worth_it(candidate, measured(records), belief):
        return None
    own, other = (belief.outlook(each).speed.tokens_per_second for each in (best, candidate))
    return candidate if other > _HOPELESS * own else None


def _sampled(space: Space, records: Sequence[Record], choices: Choices, tried: Sequence[Candidate]) -> Candidate | None:
    """What Optuna asks for after those that were tried, the winner first; None if nothing is likely to fit."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        # Optuna 4 calls constraints experimental; 5 needs a method that 4 does not have.
        warnings.simplefilter("ignore")
        sampler = optuna.samplers.TPESampler(seed=len(tried) - 1, n_startup_trials=_STARTUP, constraints_func=_excess)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    distributions: dict[str, BaseDistribution] = {
        name: CategoricalDistribution(options) for name, options in choices.items()
    }
    seen, belief = measured(records), believe(space, records)
    for candidate in tried:
        study.enqueue_trial(knobs_of(space.workload, candidate.engine, space.world_size))
        _tell(study, study.ask(distributions), seen[candidate.key])
    for _ in range(_MOST_QUESTIONS):
        trial = study.ask(distributions)
        candidate = with_knobs(space.workload, tried[0], trial.params, space.world_size)
        if _is_worth_it(candidate, seen, belief):
            return candidate
        _tell(study, trial, seen.get(candidate.key))
    return None


def _is_worth_it(candidate: Candidate, seen: Mapping[str, Record], belief: Belief) -> bool:
    """Not if it was measured, nor if it is unlikely to fit: the possible gain is small."""
    return candidate.key not in seen and belief.outlook(candidate).fits >= LIKELY


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
