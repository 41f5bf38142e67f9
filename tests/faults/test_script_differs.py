"""A script that trains otherwise than its answer says is found out in its proof; and one that waits for its data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import Finished, ladder
from helpers.rehearsals import Rehearsals, rehearsals
from helpers.scripts import MISBEHAVING, files_in, folder_with_inputs

pytest.importorskip("datasets")  # the script reads its data with it

SCRIPT = f"{MISBEHAVING}/own_batch.py"
TUNE = ("tune", "--gpus", "0", "--gpu-memory", "3GiB", "--rung", "zero2", "--micro-batch", "4", "--documented")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, script_inputs: Path) -> tuple[Path, Finished]:
    folder = folder_with_inputs(tmp_path_factory.mktemp("differs"), script_inputs)
    done = ladder(*TUNE, "--", SCRIPT, folder=folder)
    assert done.status == 0, done.errors
    return folder, done


def section_in(folder: Path) -> dict[str, Any]:
    section: dict[str, Any] = json.loads((folder / "best_config.json").read_text())["ladder"]
    return section


@pytest.mark.night  # a proof of it is below
@pytest.mark.alone  # beside other tests its steps differ so much that its answer warns of noise
def test_a_script_whose_loader_sets_the_pace_is_told_by_how_much(tuned: tuple[Path, Finished]) -> None:
    folder, done = tuned
    section = section_in(folder)
    share = section["script"]["loader_share"]
    assert share > 0.3, "each batch takes its collator 50 ms"
    warning = f"{share:.0%} of a step waits for the script's data loader, which more of its workers may shorten"
    assert warning in section["warnings"], section["warnings"]
    assert not any("may be noise" in each for each in section["warnings"]), section["warnings"]
    assert f"Warning: {warning}." in done.output


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


@pytest.mark.night  # a whole verification, for its sentence
def test_a_verification_ends_with_what_a_script_decides_itself(tuned: tuple[Path, Finished]) -> None:
    folder, _ = tuned
    before = files_in(folder)
    done = ladder("verify", "best_config.json", "--", SCRIPT, "--own_batch", folder=folder)
    assert done.status == 2
    (sentence,) = [line for line in done.errors.splitlines() if line.startswith("ladder: ")]
    assert sentence.startswith("ladder: 'best_config.json' could not be verified, because the script failed: rank ")
    assert sentence.endswith("and the candidate has 4; leave that setting of the script to ladder.")
    assert done.num_left == 0
    assert files_in(folder) == before
