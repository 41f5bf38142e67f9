"""`ladder verify`, before any trial: files that are no promise, options that contradict each other, what holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from helpers import make_candidate, make_measurement, make_record
from helpers.answers import answer
from helpers.scripts import make_script

import ladder
from ladder.cli.main import main
from ladder.emit.config import _digest, best_config
from ladder.errors import MoreMemoryThanPromisedError, NothingFitsError, SlowerThanPromisedError, UsageError
from ladder.events.outcome import Record
from ladder.tuning.tune_events import TuneEvent
from ladder.tuning.verification import _compare_script, _model
from ladder.tuning.verified import Verification
from ladder.units import GIB, MIB


def test_gpus_that_are_not_here_are_said_before_any_trial(
    simulated_run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    document = json.loads((simulated_run / "best_config.json").read_text())
    del document["ladder"]["proof"]["simulated"]  # as if it were measured
    document["ladder"]["digest"] = _digest(document)
    (tmp_path / "measured.json").write_text(json.dumps(document))
    assert main(["verify", "measured.json"]) == 2
    assert "8 asks for more GPUs" in capsys.readouterr().err


def test_a_simulated_answer_promises_nothing(
    simulated_run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["verify", str(simulated_run / "best_config.json"), "--format", "json"]) == 2
    printed = capsys.readouterr()
    assert "is a simulated answer: its figures were never measured" in printed.err
    assert printed.err.count("\n") == 1
    assert json.loads(printed.out)["exit_code"] == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "asked",
    [{"steps": 0}, {"steps": 2.5}, {"minutes": 0}, {"minutes": float("nan")}, {"tolerance": 5}, {"tolerance": -0.1}],
    ids=str,
)
def test_a_length_or_tolerance_that_cannot_be_is_refused_before_the_file_is_read(asked: dict[str, Any]) -> None:
    (name,) = asked
    with pytest.raises(UsageError, match=f"{name}: .* is not valid; give a"):
        ladder.verify("none.json", **asked)


def test_a_script_with_another_optimizer_than_its_answer_s_is_refused() -> None:
    promised = best_config(answer(workload={"script": make_script()}))["ladder"]["script"]
    told: list[TuneEvent] = []
    said = "was tuned for the optimizer adamw_torch_fused, but the script trains with adafactor; tune it again"
    with pytest.raises(UsageError, match=said):
        _compare_script(Path("best_config.json"), promised, make_script(optimizer="adafactor").facts, told.append)
    _compare_script(Path("best_config.json"), promised, make_script().facts, told.append)
    assert told == []


def verification(
    record: Record, tolerance: float = 0.05, device: Literal["cuda", "cpu"] = "cuda", **changes: Any
) -> Verification:
    return Verification(
        path=Path("best_config.json"),
        candidate_key=record.candidate_key,
        record=record,
        promised_tokens_per_second=1000.0,
        promised_device_bytes=4 * GIB,
        promised_allocated_bytes=20 * GIB,
        promised_reserved_bytes=30 * GIB,
        memory_limit=80 * GIB,
        device=device,
        tolerance=tolerance,
        seconds=1.0,
        **changes,
    )


@pytest.mark.parametrize(
    ("speed", "promised", "holds"),
    [
        (2000.0, None, True),
        (951.0, None, True),
        (949.0, None, False),
        (1100.0, (800.0, 1200.0), True),
        (761.0, (800.0, 1200.0), True),
        (759.0, (800.0, 1200.0), False),
    ],
)
def test_it_holds_down_to_the_tolerance_below_what_is_promised(
    speed: float, promised: tuple[float, float] | None, holds: bool
) -> None:
    record = make_record(make_candidate(), tokens_per_second=speed, measurement=make_measurement())
    seen = verification(record, promised_range=promised)
    assert seen.holds is holds
    assert promised is None or f"{speed:,.0f} tokens/s (800 to 1,200 promised), " in seen.sentence()
    if holds:
        seen.require()
    else:
        with pytest.raises(SlowerThanPromisedError, match=r"5\.1% slower"):
            seen.require()


def test_what_runs_out_of_memory_no_longer_fits_however_fast_it_was() -> None:
    seen = verification(make_record(make_candidate(), "gpu_oom"), tolerance=0.99)
    assert (seen.fits, seen.holds) == (False, False)
    with pytest.raises(NothingFitsError, match="no longer fits here: ended in gpu_oom"):
        seen.require()


def taking(allocated: int, reserved: int, device: Literal["cuda", "cpu"] = "cuda") -> Verification:
    """A verification that saw so many bytes at the promised speed."""
    seen = make_measurement(peak_allocated=allocated, peak_reserved=reserved)
    return verification(make_record(make_candidate(), tokens_per_second=1000.0, measurement=seen), device=device)


@pytest.mark.parametrize(
    ("device", "allocated", "holds"),
    [
        ("cuda", 19 * GIB, True),
        ("cuda", 20 * GIB + 200 * MIB, True),
        ("cuda", 20 * GIB + 210 * MIB, False),
        ("cpu", 25 * GIB, True),
        ("cpu", 25 * GIB + MIB, False),
    ],
)
def test_tensors_may_take_a_hundredth_more_than_promised_and_a_quarter_on_the_cpu(
    device: Literal["cuda", "cpu"], allocated: int, holds: bool
) -> None:
    seen = taking(allocated, allocated, device)
    assert seen.holds is holds
    if holds:
        seen.require()
    else:
        with pytest.raises(MoreMemoryThanPromisedError, match=r"takes 2.\.\d\d GiB where it promises 20\.00 GiB"):
            seen.require()


def test_a_cache_that_grew_is_told_and_fails_nothing() -> None:
    assert taking(20 * GIB, 30 * GIB + 300 * MIB).caches_more == ""
    grown = taking(20 * GIB, 31 * GIB)
    assert grown.caches_more.startswith("torch's allocator reserved 31.00 GiB (30.00 GiB promised); the tensors")
    assert grown.holds
    assert taking(22 * GIB, 32 * GIB).caches_more == "", "one sentence is enough"


def test_a_model_folder_is_found_again_from_any_other_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    found = {"name": "model", "source": "folder", "folder": str(tmp_path / "model")}
    assert _model(found) == str(tmp_path / "model")
    assert _model({"name": "model", "source": "folder", "folder": str(tmp_path / "moved")}) == "model"
    assert _model({"name": "org/model", "source": "hub", "folder": None}) == "org/model"
