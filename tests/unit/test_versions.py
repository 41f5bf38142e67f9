"""Which versions ladder trains with, and what it leaves out with some of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers import TINY
from helpers.scripts import make_script
from packaging.requirements import Requirement

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.machine.versions import RANGES, is_within
from ladder.tuning import obstacles
from ladder.workload.workload import OptimizerName, Workload

ROOT = Path(__file__).parents[2]
NEWEST = {"torch": "2.13.0", "transformers": "5.24.0", "accelerate": "1.15.0", "deepspeed": "0.19.8"}
WORKLOAD = Workload(model=TINY, task="causal-lm", seq_len=64, global_batch_size=4)


@pytest.mark.parametrize(
    ("version", "specifier", "is_in"),
    [
        ("2.10.0a0+b4e4ee8", ">=2.10", True),  # a pre-release in NVIDIA's containers
        ("2.6.0+cu124", ">=2.6", True),
        ("2.5.1", ">=2.6", False),
        ("6.0.0.dev0", ">=4.48,<6", False),
        ("", ">=1.6", False),
        ("of my own", ">=1.6", False),
    ],
)
def test_a_pre_release_counts_as_its_release_and_no_version_as_none(version: str, specifier: str, is_in: bool) -> None:
    assert is_within(version, specifier) is is_in


def test_what_a_new_environment_gets_is_within_the_ranges_which_the_page_of_toolkits_names() -> None:
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = [each for each in map(Requirement, extras["train"]) if each.name in RANGES]
    floors = {each.name: next(one.version for one in each.specifier if one.operator == ">=") for each in asked}
    assert floors.keys() == RANGES.keys()
    assert all(is_within(floor, RANGES[name]) for name, floor in floors.items())
    page = (ROOT / "docs" / "reference" / "toolkits.md").read_text()
    assert ", ".join(f"{name} {versions}" for name, versions in RANGES.items()) in page


@pytest.mark.parametrize(
    ("versions", "rung", "optimizer", "said"),
    [
        ({}, "zero2", "adamw", ""),
        ({"deepspeed": "0.17.6"}, "zero2", "adamw", "issue 7718"),
        ({"deepspeed": "0.18.2+cu12"}, "zero2+opt-cpu", "adamw", "issue 7718"),
        ({"deepspeed": "0.17.6"}, "zero3", "adamw", ""),
        ({"deepspeed": "0.18.3"}, "zero2", "adamw", ""),
        ({"deepspeed": "0.19.5"}, "zero3", "sgd", "trains wrongly with SGD"),
        ({"deepspeed": "0.19.0"}, "zero1", "adamw", "diverges where accelerate drives it"),
        ({"deepspeed": ""}, "zero1", "adamw", "deepspeed is not installed"),
        ({"accelerate": "1.6.0"}, "fsdp2", "adamw", "accelerate 1.6.0 has an FSDP2"),
        ({"accelerate": "1.6.0", "deepspeed": ""}, "ddp", "adamw", ""),
    ],
)
def test_a_rung_that_a_version_trains_wrongly_is_left_out_with_the_reason(
    versions: dict[str, str], rung: str, optimizer: OptimizerName, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obstacles, "version_of", lambda name: {**NEWEST, **versions}[name])
    workload = replace(WORKLOAD, optimizer=optimizer)
    assert said in obstacles.flaw_of(RUNGS_BY_NAME[rung], workload)
    assert bool(said) == bool(obstacles.flaw_of(RUNGS_BY_NAME[rung], workload))


def test_a_loop_that_drives_deepspeed_itself_is_not_asked_how_accelerate_drives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(obstacles, "version_of", lambda name: {**NEWEST, "deepspeed": "0.19.0"}[name])
    workload = replace(WORKLOAD, script=make_script("train.py", kind="deepspeed"))
    assert obstacles.flaw_of(RUNGS_BY_NAME["zero1"], workload) == ""
