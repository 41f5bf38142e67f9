"""`ladder verify` with real trials on two CPU ranks: what no longer fits, what is slower than promised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import ladder

from ladder.emit.config import _digest

pytestmark = pytest.mark.timeout(900)  # the first test waits for the small tune, which a busy machine disturbs


def promise(
    small_tune: Path,
    name: str,
    *,
    tokens_per_second: float | None = None,
    limit: int | None = None,
    batch: int | None = None,
) -> str:
    """A best_config.json that promises something else, as if ladder had written it."""
    document: dict[str, Any] = json.loads((small_tune / "best_config.json").read_text())
    if tokens_per_second is not None:
        document["ladder"] |= {"tokens_per_second": tokens_per_second, "tokens_per_second_range": None}
    if limit is not None:
        document["ladder"]["memory_per_gpu"]["limit_bytes"] = limit
    if batch is not None:
        document["ladder"]["workload"]["global_batch_size"] = batch
    document["ladder"]["digest"] = _digest(document)
    (small_tune / name).write_text(json.dumps(document))
    return name


def test_slower_than_promised_has_a_status_of_its_own_and_the_figures_beside_each_other(small_tune: Path) -> None:
    file = promise(small_tune, "fast.json", tokens_per_second=1e6)
    done = ladder("verify", file, "--minutes", "0.1", "--format", "json", folder=small_tune)
    assert done.status == 6, done.errors
    assert "slower than it promises" in done.errors
    assert "proof of" in done.errors
    document = json.loads(done.output)
    assert (document["fits"], document["holds"]) == (True, False)
    assert document["seconds"] > 6  # it trained for as long as it was told
    seen = document["peak_device_gib"]
    assert seen["seen"] == pytest.approx(seen["promised"], rel=0.2)


@pytest.mark.parametrize(
    ("asked", "is_whole"), [(["--steps", "2"], True), pytest.param([], False, marks=pytest.mark.night)]
)
def test_the_steps_that_are_asked_for_are_whole_and_those_of_a_proof_have_two_micro_steps(
    small_tune: Path, asked: list[str], is_whole: bool
) -> None:
    file = promise(small_tune, "accumulating.json", batch=12)
    done = ladder("verify", file, *asked, "--tolerance", "0.99", "--format", "json", folder=small_tune)
    assert done.status == 0, done.errors
    section = json.loads((small_tune / file).read_text())["ladder"]
    whole = 12 // section["world_size"] // section["micro_batch"]
    assert whole > 2
    rank = small_tune / "ladder-runs" / f"verify-{section['digest']}" / "trials" / "0001" / "rank0.jsonl"
    events = [json.loads(line) for line in rank.read_text().splitlines()]
    (measure,) = [event["t"] for event in events if event["kind"] == "phase" and event["phase"] == "measure"]
    (end,) = [event["t"] for event in events if event["kind"] == "phase" and event["phase"] == "evaluation"]
    timed = [event for event in events if event["kind"] == "step" and measure < event["t"] < end]
    steps = json.loads(done.output)["optimizer_steps"]
    assert len(timed) == steps * (whole if is_whole else 2)
    assert not asked or steps == 2


def test_what_no_longer_fits_says_where_it_ran_out(small_tune: Path) -> None:
    done = ladder("verify", promise(small_tune, "small.json", limit=200 << 20), folder=small_tune)
    assert done.status == 3
    assert "no longer fits here: rank" in done.errors
    assert done.errors.count("Traceback") == 0
