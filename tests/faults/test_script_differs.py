"""A script that trains otherwise than its answer says is found out by `ladder verify`; and one that waits for its data.

All tests share one tune.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import Finished, ladder
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


@pytest.mark.parametrize(
    ("option", "differs"),
    [
        ("--own_batch", "sequences in a micro-step: 2, and the candidate has 4"),
        ("--own_accumulation", "micro-steps in an optimizer step: 2, and the candidate has 1"),
        pytest.param(
            "--own_checkpointing",
            "gradient checkpointing: on, and the candidate has off",
            marks=pytest.mark.night,  # it is found by the same comparison
        ),
    ],
)
def test_a_script_that_decides_itself_what_a_trial_decides_is_found_out_in_the_proof(
    option: str, differs: str, tuned: tuple[Path, Finished]
) -> None:
    folder, _ = tuned
    if option == "--own_checkpointing" and section_in(folder)["gradient_checkpointing"]:
        pytest.skip("on this machine recomputing the layers was faster")
    before = files_in(folder)
    done = ladder("verify", "best_config.json", "--", SCRIPT, option, folder=folder)
    assert done.status == 2
    (sentence,) = [line for line in done.errors.splitlines() if line.startswith("ladder: ")]
    assert sentence.startswith("ladder: 'best_config.json' could not be verified, because the script failed: rank ")
    assert sentence.endswith(f"the script trains with {differs}; leave that setting of the script to ladder.")
    assert done.num_left == 0
    assert files_in(folder) == before


def test_a_script_with_another_optimizer_is_found_out_before_its_proof(tuned: tuple[Path, Finished]) -> None:
    folder, _ = tuned
    done = ladder("verify", "best_config.json", "--", SCRIPT, "--own_optimizer", folder=folder)
    assert done.status == 2
    assert done.errors.endswith(
        "ladder: 'best_config.json' was tuned for the optimizer adamw_torch, but the script trains with adafactor; "
        "tune it again.\n"
    )
