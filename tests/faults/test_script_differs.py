"""A script that trains otherwise than its answer says is found out in its proof; and one that waits for its data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.rehearsals import Rehearsals, rehearsals
from helpers.scripts import MISBEHAVING, folder_with_inputs

pytest.importorskip("datasets")  # the script reads its data with it

SCRIPT = f"{MISBEHAVING}/own_batch.py"


@pytest.fixture(scope="module")
def looks(
    tmp_path_factory: pytest.TempPathFactory, script_inputs: Path, trial_environment: dict[str, str]
) -> Iterator[Rehearsals]:
    folder = tmp_path_factory.mktemp("looks")
    with rehearsals(folder_with_inputs(folder / "home", script_inputs), folder / "trials", trial_environment) as held:
        yield held


@pytest.mark.parametrize(
    ("option", "differs"),
    [
        ("--own_batch", "sequences in a micro-step: 2, and the candidate has 4"),
        ("--own_accumulation", "micro-steps in an optimizer step: 2, and the candidate has 1"),
        ("--own_checkpointing", "gradient checkpointing: on, and the candidate has off"),
    ],
)
def test_a_script_that_decides_itself_what_a_trial_decides_is_found_out_in_the_proof(
    option: str, differs: str, looks: Rehearsals
) -> None:
    done = looks.trial(SCRIPT, option, proof=True)
    assert done.said == f"the script trains with {differs}; leave that setting of the script to ladder"
    assert done.made == frozenset()


def test_a_proof_says_how_long_its_steps_wait_for_the_script_s_data(looks: Rehearsals) -> None:
    reported = (looks.trial(SCRIPT, proof=True).folder / "rank0.jsonl").read_text()
    (told,) = re.findall(r'"loader_share":([\d.]+)', reported)
    assert float(told) > 0.3, "each batch takes its collator 50 ms"
