"""Reads a tune's result back from its run folder; a tune that still runs has the result so far."""

from __future__ import annotations

import fcntl
import os
from dataclasses import replace
from pathlib import Path

from ladder.emit import Answer
from ladder.events.outcome import Record
from ladder.report.run_data import ANSWER_NAME, is_simulated
from ladder.runs.stored_run import StoredRun, read_run
from ladder.search.knobs import less_noise
from ladder.search.policy import answer, told
from ladder.search.space import fastest
from ladder.tuning.answering import TuneOutput, answer_of, said_to_be_simulated
from ladder.tuning.tuner import TuneResult


def stored_output(folder: Path) -> TuneOutput:
    """What the tune in `folder` has found. UsageError if there is none, EnvironmentFaultError if it is damaged."""
    stored = read_run(folder)
    found = answer(stored.records)
    result = TuneResult(
        space=stored.space,
        unsupported=stored.unsupported,
        records=stored.records,
        answer=found,
        best_so_far=fastest(less_noise(stored.space, stored.records)),
        stopped="read from its run folder",
        cancelled=False,
        seconds=sum(sum(phases.values()) for phases in stored.trial_seconds.values()),
    )
    copy = folder / ANSWER_NAME
    of_deepspeed, plain = (
        _answer(proof, stored, folder) if proof is not None else None
        for proof in told(stored.records, stored.space.tolerance)
    )
    return TuneOutput(
        result=result,
        answer=replace(of_deepspeed, plain=plain) if of_deepspeed is not None else None,
        plain=plain,
        files=[copy.absolute()] if found is not None and copy.is_file() else [],
        run_dir=folder,
        trial_seconds=stored.trial_seconds,
        simulated=str(stored.facts["simulated machine"]["name"]) if is_simulated(stored.facts) else None,
    )


def is_running(folder: Path) -> bool:
    """Whether a running tune holds the lock of this run folder."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


def _answer(found: Record, stored: StoredRun, folder: Path) -> Answer:
    facts = stored.facts
    versions = {str(name): str(version) for name, version in facts["versions"].items()}
    made = answer_of(found, stored.space, facts.get("allocator", {}), versions, folder, stored.records)
    if not is_simulated(facts):
        return made
    return said_to_be_simulated(made, str(facts["simulated machine"]["name"]))
