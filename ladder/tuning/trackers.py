"""Logs a tune's candidates and its answer to an experiment tracker: trackio, Weights & Biases or MLflow.

Each is an optional dependency and is configured by its own environment variables (WANDB_MODE=offline,
MLFLOW_TRACKING_URI, …), as its documentation says. ladder neither asks for nor writes credentials.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from typing import Any, Literal, Protocol, get_args

from ladder.emit import Answer
from ladder.errors import EnvironmentFaultError, UsageError
from ladder.events.outcome import Record
from ladder.events.verdict import trial_seconds
from ladder.machine.lease import InterruptedWaitError
from ladder.search.space import Space
from ladder.text import instead_of, shown
from ladder.tuning.declaring import spread
from ladder.tuning.options import TrackerName, TuneOptions
from ladder.tuning.tune_events import Note, SearchBegins, Subscriber, TrialEnds, TuneEnds, TuneEvent, each_of, ignore
from ladder.units import gib

HowItEnded = Literal["succeeded", "failed", "interrupted"]
"""How a tune ended. An interrupted one can be continued, so its result is not final."""
_PACKAGES = {"mlflow": "mlflow-skinny sqlparse"}
"""Packages to install, if their name is not the tracker's."""
_PROJECT = "ladder"


class Tracker(Protocol):
    """An open run in a tracker. `figures` are texts, numbers and booleans by name, without None."""

    def candidate(self, name: str, figures: Mapping[str, Any]) -> None: ...
    def answer(self, figures: Mapping[str, Any]) -> None: ...
    def close(self, ending: HowItEnded) -> None: ...


class Tracking:
    """Passes the events of a tune on to a tracker. If the tracker fails, the tune continues."""

    def __init__(self, tracker: Tracker | None, name: str) -> None:
        self._tracker = tracker
        self._name = name
        self._interrupted = False
        self._others: Subscriber = ignore
        self._space: Space | None = None

    def beside(self, others: Subscriber) -> Subscriber:
        """A subscriber that passes events on to `others` and to the tracker. `others` also get the tracker's errors."""
        self._others = others
        return each_of(others, self)

    def __call__(self, event: TuneEvent) -> None:
        """Handle the next event of the tune."""
        match event:
            case SearchBegins(space=space, records=records):
                self._space = space
                self._log(records, None)  # measured by an earlier start; the tracker's run shall be complete
            case TrialEnds(run=run, records=records):
                self._log(records, sum(trial_seconds(run).values()))
            case TuneEnds(interrupted=True):  # it has no final answer
                self._interrupted = True
            case TuneEnds(answer=answer):
                figures = _figures_of(answer)
                self._safely(lambda tracker: tracker.answer(figures))

    def close(self, ending: HowItEnded) -> None:
        """Close the tracker's run. An interrupted tune returns normally, so `ending` is then corrected here."""
        real: HowItEnded = "interrupted" if self._interrupted else ending
        self._safely(lambda tracker: tracker.close(real))

    def _log(self, records: Sequence[Record], seconds: float | None) -> None:
        for record in records:
            figures = {name: value for name, value in self._figures(record, seconds).items() if value is not None}
            self._safely(partial(_log_candidate, figures))

    def _figures(self, record: Record, seconds: float | None) -> dict[str, Any]:
        """The figures of a record, named like the columns of trials.csv."""
        candidate = self._space.by_key[record.candidate_key] if self._space is not None else None
        seen = record.measurement
        return {
            "candidate": record.candidate_key,
            "trial": record.trial,
            "purpose": record.purpose,
            "rung": candidate.engine.name if candidate else None,
            "checkpointing": candidate.checkpointing if candidate else None,
            "micro_batch": candidate.micro_batch if candidate else None,
            "accumulation": candidate.accumulation if candidate else None,
            "outcome": record.outcome.kind,
            "tokens_per_second": record.tokens_per_second,
            "step_seconds": seen.step_seconds(candidate.accumulation) if seen and candidate else None,
            "peak_device_gib": gib(seen.peak_device) if seen else None,
            "host_gib": gib(seen.peak_host) if seen else None,
            "watts": seen.watts if seen else None,
            "trial_seconds": seconds,
        }

    def _safely(self, tell: Callable[[Tracker], None]) -> None:
        """Call the tracker. After its first error it is not called again, so that hours of trials are not lost."""
        if self._tracker is None:
            return
        try:
            with redirect_stdout(sys.stderr):  # stdout is for the answer only
                tell(self._tracker)
        except Exception as error:
            self._tracker = None
            self._others(Note(f"Warning: logging to {self._name} failed and stops: {shown(error)[:200]}"))


@contextmanager
def tracking(name: str | None, asked: TuneOptions) -> Iterator[Tracking]:
    """Open a run of the tracker `name` with the options `asked` as its configuration; without a name, log nothing.

    UsageError if the package is missing, EnvironmentFaultError if no run can be opened. Enter it before the live view
    starts: a tracker may ask a question on the terminal.
    """
    tracker = _open(name, asked) if name is not None else None
    opened = Tracking(tracker, name or "")
    ending: HowItEnded = "failed"
    try:
        yield opened
        ending = "succeeded"
    except (InterruptedWaitError, KeyboardInterrupt):
        ending = "interrupted"
        raise
    finally:
        opened.close(ending)


def _open(name: str, asked: TuneOptions) -> Tracker:
    if name not in get_args(TrackerName):
        raise UsageError(f"The tracker {shown(name)} is unknown; {instead_of(name, get_args(TrackerName))}")
    try:
        library: Any = importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"Logging to {name} needs a package that is missing ({shown(error)}); "
            f"`pip install {_PACKAGES.get(name, name)}`."
        ) from None
    trackers: dict[str, Callable[[Any, str, Mapping[str, Any]], Tracker]] = {
        "trackio": _Trackio,
        "wandb": _Wandb,
        "mlflow": _Mlflow,
    }
    config = {key: _plain(value) for key, value in spread(asked).items() if value is not None}
    try:
        with redirect_stdout(sys.stderr):
            return trackers[name](library, asked.model, config)
    except Exception as error:
        raise EnvironmentFaultError(f"{name} cannot open a run: {shown(' '.join(str(error).split()))[:300]}") from error


def _figures_of(answer: Answer | None) -> dict[str, Any]:
    """The figures of the tune's answer."""
    if answer is None:
        return {"answer": "none"}
    return {
        "answer": answer.candidate.key,
        "answer_tokens_per_second": answer.tokens_per_second,
        "answer_step_seconds": answer.step_seconds,
        "answer_peak_device_gib": gib(answer.measurement.peak_device),
        "memory_limit_gib": gib(answer.memory_limit),
        "world_size": answer.world_size,
        "gpu": answer.gpu_name or answer.device,
        "simulated": bool(answer.proof.get("simulated")),
    }


def _log_candidate(figures: Mapping[str, Any], tracker: Tracker) -> None:
    tracker.candidate(figures["candidate"], figures)


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | float):
        return value
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


class _Trackio:
    """Logs one step per candidate to the local database that `trackio show` opens."""

    def __init__(self, library: Any, model: str, config: Mapping[str, Any]) -> None:
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._trackio = library
        self._run = library.init(project=_PROJECT, config=dict(config), **quiet)

    def candidate(self, name: str, figures: Mapping[str, Any]) -> None:
        self._run.log(dict(figures))

    def answer(self, figures: Mapping[str, Any]) -> None:
        self._run.log(dict(figures))

    def close(self, ending: HowItEnded) -> None:
        self._trackio.finish()  # the run's own `finish` would be called again at exit and print to stdout


class _Wandb:
    """Logs one step per candidate; the answer is the run's summary."""

    def __init__(self, library: Any, model: str, config: Mapping[str, Any]) -> None:
        project = os.environ.get("WANDB_PROJECT", _PROJECT)
        settings = library.Settings(console="off", x_disable_stats=True)  # the live view uses the terminal
        self._run = library.init(project=project, config=dict(config), settings=settings, reinit="create_new")

    def candidate(self, name: str, figures: Mapping[str, Any]) -> None:
        self._run.log(dict(figures))

    def answer(self, figures: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(figures))

    def close(self, ending: HowItEnded) -> None:
        self._run.finish(exit_code=0 if ending == "succeeded" else 1)


class _Mlflow:
    """Logs one run for the tune with a child run per candidate, because MLflow compares runs."""

    def __init__(self, library: Any, model: str, config: Mapping[str, Any]) -> None:
        self._client, self._entities = library.MlflowClient(), library.entities
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        known = self._client.get_experiment_by_name(name)
        self._experiment = known.experiment_id if known else self._client.create_experiment(name)
        self._run = self._create(f"tune {model}", {})
        self._put(self._run, config)

    def candidate(self, name: str, figures: Mapping[str, Any]) -> None:
        run = self._create(name, {"mlflow.parentRunId": self._run})
        self._put(run, figures)
        self._client.set_terminated(run)

    def answer(self, figures: Mapping[str, Any]) -> None:
        self._put(self._run, figures)

    def close(self, ending: HowItEnded) -> None:
        status = {"succeeded": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}[ending]
        self._client.set_terminated(self._run, status)

    def _create(self, name: str, tags: dict[str, str]) -> str:
        return str(self._client.create_run(self._experiment, run_name=name, tags=tags).info.run_id)

    def _put(self, run: str, figures: Mapping[str, Any]) -> None:
        """Log measured figures as metrics, and all others as parameters in one request."""
        measured = {name: value for name, value in figures.items() if isinstance(value, float)}
        for name, value in measured.items():
            self._client.log_metric(run, name, value)
        params = [self._entities.Param(name, str(value)) for name, value in figures.items() if name not in measured]
        self._client.log_batch(run, params=params)
