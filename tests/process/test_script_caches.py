"""The caches of the Hub and of `datasets` stay the user's own: a tune adds to them what the script adds by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ladder
from helpers.scripts import SCRIPTS, digest_of, files_in, folder_with_inputs

from ladder.launch.protecting import protection_here

pytest.importorskip("datasets")  # the script reads its data with it

SCRIPT = str(SCRIPTS / "tokenises.py")
TUNE = ("tune", "--gpus", "0", "--gpu-memory", "3GiB", "--rung", "zero2", "--micro-batch", "4", "--documented")


@pytest.fixture
def home(tmp_path: Path, script_inputs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder. The user's cache is beside it, and so is the file in which the script notes what it does."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    if protection_here().level == "landlock":
        pytest.skip("in a copy of the working folder, data have another path, by which `datasets` knows them")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "notes"))  # a cache, too, so that it is really written
    (tmp_path / "notes").mkdir()
    monkeypatch.setenv("TOKENISED", str(tmp_path / "notes" / "tokenised"))
    monkeypatch.setenv("HF_UPDATE_DOWNLOAD_COUNTS", "0")  # of the script's own training: no test needs the network
    folder = folder_with_inputs(tmp_path / "home", script_inputs)
    whole = (folder / "text" / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "text" / "half.jsonl").write_text("".join(whole[::2]))
    return folder


def trained(data: str, home: Path) -> None:
    """The script's own training, without ladder."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "0"}
    subprocess.run(
        [sys.executable, SCRIPT, data], cwd=home, env=environment, check=True, capture_output=True, timeout=250
    )


def tuned(data: str, home: Path) -> None:
    # Online, as users are; the script has everything here.
    done = ladder(*TUNE, "--run-dir", "ladder-runs/own", "--", SCRIPT, data, folder=home, is_offline=False)
    assert done.status == 0, done.errors
    assert len(list((home / "ladder-runs" / "own" / "trials").iterdir())) >= 2


def in_cache(home: Path) -> dict[str, str]:
    folder = home.parent / "cache"
    return {str(file.relative_to(folder)): digest_of(file) for file in sorted(folder.rglob("*")) if file.is_file()}


def tokenised(home: Path) -> list[str]:
    return (home.parent / "notes" / "tokenised").read_text().splitlines()


def test_a_tune_tokenises_once_for_all_its_trials_and_for_the_training_that_follows(home: Path) -> None:
    trained("text/half.jsonl", home)
    before, own = in_cache(home), files_in(home)
    assert any(name.endswith(".arrow") for name in before)
    tuned("text/train.jsonl", home)
    filled = in_cache(home)
    assert before.items() < filled.items(), "what was there is there unchanged, and the new data set beside it"
    assert files_in(home) == own
    trained("text/train.jsonl", home)
    assert tokenised(home) == ["200 texts", "400 texts"], "the look did it for all that came after it"
    assert in_cache(home) == filled


@pytest.mark.night
def test_a_tune_of_what_the_user_has_tokenised_before_adds_nothing_to_the_cache(home: Path) -> None:
    trained("text/train.jsonl", home)
    before = in_cache(home)
    tuned("text/train.jsonl", home)
    assert tokenised(home) == ["400 texts"]
    assert in_cache(home) == before
