"""The time of trials by phase: start, process group, model, engine, warm-up, measurement, proof, teardown."""

from __future__ import annotations

from collections.abc import Mapping

from ladder.units import counted

PHASES = {
    "start": "start",
    "process_group": "process group",
    "model": "model",
    "engine": "engine",
    "warmup": "warm-up",
    "measure": "measurement",
    "evaluation": "evaluation",
    "gather": "gathering",
    "teardown": "teardown",
}
"""The names of a trial's phases in output, in their order."""


def trial_line(seconds: Mapping[str, float]) -> str:
    """The seconds of one trial, and of its phases of 0.1 s or more."""
    parts = [f"{name} {seconds[phase]:.1f}" for phase, name in PHASES.items() if seconds.get(phase, 0.0) >= 0.1]
    return f"{sum(seconds.values()):.1f} s ({', '.join(parts)})"


def total_line(trials: Mapping[str, Mapping[str, float]], *, on_paper: bool = False) -> str:
    """The seconds of all trials together, and each phase's share. `on_paper` says that they are simulated."""
    total = sum(sum(seconds.values()) for seconds in trials.values())
    if not total:
        return "No trial was run."
    shares = {phase: sum(seconds.get(phase, 0.0) for seconds in trials.values()) / total for phase in PHASES}
    parts = [f"{name} {shares[phase]:.0%}" for phase, name in PHASES.items() if shares[phase] >= 0.005]
    trials_took = f"{counted(len(trials), 'trial')} {'would have taken' if on_paper else 'took'}"
    return f"{trials_took} {total:.0f} s: {', '.join(parts)}."


def clock(seconds: float) -> str:
    """`seconds` as 0:42, 12:05 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
