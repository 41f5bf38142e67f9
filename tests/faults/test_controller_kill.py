"""`kill -9` of the controller, many times at random moments: no rank outlives it, and the tune loses nothing."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from faults.command import Command, started
from faults.steady_ladder import ANSWER
from helpers import wait_until

SEED = 5
LONGEST_START_SECONDS, LONGEST_TRIAL_SECONDS = 3.0, 0.8


def recorded(run_dir: Path) -> list[str]:
    """The candidates whose measurement is in the history, in order."""
    journal = run_dir / "journal.log"
    lines = journal.read_bytes().split(b"\n")[:-1] if journal.exists() else []
    keys = []
    for line in lines:
        record = json.loads(line).get("user_attrs", {}).get("record") or {}
        if record.get("purpose") == "measure":
            keys.append(record["candidate_key"])
    return keys


def sleep_until_the_moment(command: Command, moment: random.Random, in_a_trial: bool) -> None:
    """A random while after the start, or after the ranks of the next trial have begun."""
    if in_a_trial:
        begun = len(list((command.run_dir / "trials").glob("*/rank1.jsonl")))
        wait_until(lambda: _has_begun(command, begun) or command.process.poll() is not None, 90)
    time.sleep(moment.uniform(0, LONGEST_TRIAL_SECONDS if in_a_trial else LONGEST_START_SECONDS))


def _has_begun(command: Command, before: int) -> bool:
    return len(list((command.run_dir / "trials").glob("*/rank1.jsonl"))) > before


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_kills", [6, pytest.param(20, marks=pytest.mark.night)])
def test_kills_of_the_controller_leave_no_process_and_lose_at_most_the_trial_they_hit(
    tmp_path: Path, num_kills: int
) -> None:
    moment = random.Random(SEED)
    num_killed, num_with_ranks = 0, 0
    done: list[str] = []
    for index in range(num_kills):
        with started(tmp_path) as command:
            sleep_until_the_moment(command, moment, in_a_trial=index % 3 == 1)
            num_with_ranks += len(command.marked()) >= 3
            command.process.send_signal(signal.SIGKILL)
            num_killed += command.process.wait() == -signal.SIGKILL
            wait_until(lambda: command.marked() == [], 3)
            now_done = recorded(command.run_dir)
            assert now_done[: len(done)] == done
            done = now_done
    assert num_killed >= num_kills - 2  # the tune may have come to its end before the last ones
    assert num_with_ranks >= num_kills // 5

    with started(tmp_path) as command:
        assert command.process.wait(timeout=120) == 0, command.errors()
        assert command.marked() == []
        assert json.loads((tmp_path / "best_config.json").read_text())["ladder"]["rung"] == ANSWER.split()[0]
        assert f"{ANSWER}: 400 tokens/s" in command.output()
        keys = recorded(command.run_dir)
        assert len(keys) == len(set(keys)) == 5  # nothing that was measured was measured again
        assert keys[: len(done)] == done
        # Comparisons of losses are not kept: whoever kills the proof that follows them loses them as well.
        begun = Counter(command.trials(comparisons=False))
        assert sum(begun.values()) - len(keys) - 1 <= num_killed
