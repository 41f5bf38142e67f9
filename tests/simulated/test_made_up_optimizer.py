"""An optimizer is its own file and one line: a made-up one goes through search, proof, files and report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from helpers.made_up import including
from helpers.tunes import on_paper

import ladder
from ladder.backends.registry import RUNGS_BY_NAME, backend_of
from ladder.emit import load_best_config
from ladder.errors import UsageError
from ladder.optimizers.base import Optimizer
from ladder.optimizers.registry import OPTIMIZERS
from ladder.options.declaring import declared
from ladder.options.tune import TuneOptions


class Magic(Optimizer):
    name = "magic"
    rank_module = "helpers.made_up_rank"
    moments = 1
    host_operator = "cpu_magic"
    in_torch = "spells.Magic(…)"
    on_host = "spells.MagicOnHost(…)"

    def obstacle(self, stage: int, *, offloaded: bool) -> str:
        return "magic cannot be divided" if stage == 3 and not offloaded else ""

    def trainer_arguments(self) -> dict[str, Any]:
        return {"optim": "magic"}

    def deepspeed_settings(self) -> dict[str, Any]:
        return {"allow_magic": True}

    def deepspeed_section(self, learning_rate: float, *, offloaded: bool) -> dict[str, Any]:
        return {"type": "Magic", "params": {"lr": learning_rate}}


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with including(OPTIMIZERS, Magic()):
        yield


OFFLOADED = RUNGS_BY_NAME["zero2+opt-cpu"]


@pytest.mark.parametrize(
    ("rung", "rate", "said"),
    [("zero2", 2e-5, "DummyOptim(…, lr=2e-05)"), (OFFLOADED.name, None, "it must be spells.MagicOnHost(…)")],
)
def test_it_is_predicted_tried_proven_and_written_in_its_own_words(
    tmp_path: Path, rung: str, rate: float | None, said: str
) -> None:
    options = {"optimizer": "magic", "with_optimizer": rate, "rungs": [rung, "zero3"], "gpus": 2}
    tuned = on_paper(tmp_path, "opt-125m", global_batch_size=16, **options)
    result = tuned.output.result
    assert result.unsupported[RUNGS_BY_NAME["zero3"]] == "magic cannot be divided"
    assert result.space.workload.state_bytes() == 4.0
    assert backend_of(OFFLOADED).operators(OFFLOADED, "magic") == ("cpu_magic",)
    assert [each.candidate_key for each in result.records if each.purpose == "proof"] == [tuned.best.candidate.key]
    document = load_best_config(tmp_path / "best_config.json")
    assert document["allow_magic"] is True
    assert document["ladder"]["workload"]["optimizer"] == "magic"
    assert document.get("optimizer") == (rate and {"type": "Magic", "params": {"lr": rate}})
    assert json.loads((tmp_path / "best_config.trainer.json").read_text())["optim"] == "magic"
    assert said in (tmp_path / "best_config.launch.sh").read_text()
    assert "magic, sequence length" in tuned.report.read_text()
    assert list(ladder.load_run(tmp_path / "run").trials["rung"]) == list(tuned.trials["rung"])


def test_the_option_knows_its_name_and_a_technique_that_has_none_of_it_says_so(tmp_path: Path) -> None:
    assert "magic" in get_args(declared(TuneOptions)["optimizer"].kind.typed)
    with pytest.raises(UsageError, match='optimizer="magic", which bitsandbytes does not have in 8 bits'):
        on_paper(tmp_path, "opt-125m", optimizer="magic", allow=["adam-8bit"])
