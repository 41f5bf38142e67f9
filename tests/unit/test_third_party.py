"""What others published, in ladder's words: which rows are predicted, of which shape, and why others are left out."""

from __future__ import annotations

import re
from typing import Any

import pytest
from helpers import there
from third_party import LeftOutError, adapters_of, errors, outcomes, record_of

from ladder.workload.lora import ALL_LINEAR

QLORA = {
    "group": "somebody",
    "model": "Mistral-7B-v0.1",
    "hf_id": "mistralai/Mistral-7B-v0.1",
    "gpu": "A100 80GB",
    "num_gpus": 1,
    "seq_len": 4096,
    "micro_batch": 4,
    "grad_accum": None,
    "precision": "bf16",
    "adapter": "LoRA r=16.0 on q_proj k_proj v_proj o_proj c_attn",
    "quantised": "nf4",
    "liger_or_fused_ce": "liger",
    "compile": None,
    "optimizer": "adamw",
    "outcome": "fits",
    "peak_memory_gib": 10.0,
    "memory_kind": "torch max_memory_allocated",
    "tokens_per_second": 4000.0,
    "quality": "memory:good; time:good",
    "notes": "",
    "ladder_candidate": "ddp+liger ckpt=on mb=4",
    "not_said_by_ladder": "",
}


def test_a_row_is_predicted_and_compared_with_what_was_published_of_it() -> None:
    record = record_of(7, QLORA)
    assert (record["index"], record["group"], record["kind"]) == (7, "somebody, liger", "QLoRA")
    assert 8 < record["predicted"]["memory_gib"] < 24
    for name, value in (("memory_gib", 10.0), ("tokens_per_second", 4000.0)):
        assert record["ratio"][name] == pytest.approx(record["predicted"][name] / value, abs=1e-4)
    assert [line.split()[-4] for line in errors([record], "memory_gib")] == ["1", "1", "1"]
    with_fragments = record_of(7, QLORA | {"memory_kind": "torch max reserved"})
    assert with_fragments["predicted"]["memory_gib"] > record["predicted"]["memory_gib"]
    ran_out = record_of(8, QLORA | {"outcome": "oom", "quality": "outcome only"})
    assert ran_out["ratio"] == {}
    assert list(outcomes([record, ran_out]))[-1].split() == ["all", "2", "1", "1", "0"]


@pytest.mark.parametrize(
    ("said", "rank", "targets"),
    [
        ("LoRA r=8 on q,v (4,194,304 parameters for 7B)", 8, ("q_proj", "v_proj")),
        ("LoRA r=32 on ['v_proj', 'q_proj'] DoRA", 32, ("v_proj", "q_proj")),
        ("LoRA r=16 on all linear", 16, (ALL_LINEAR,)),
    ],
)
def test_adapters_are_read_from_the_words_of_a_row(said: str, rank: int, targets: tuple[str, ...]) -> None:
    lora = there(adapters_of({"adapter": said}))
    assert (lora.rank, lora.targets, lora.dora) == (rank, targets, "DoRA" in said)
    with pytest.raises(LeftOutError, match="not stated"):
        adapters_of({"adapter": "LoRA (in the yaml beside)"})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"not_said_by_ladder": "selective checkpointing"}, "selective checkpointing"),
        ({"ladder_candidate": None}, "no candidate"),
        ({"hf_id": None}, "shape unknown"),
        ({"gpu": "GB200"}, "GPU unknown"),
        ({"precision": "fp16"}, "bf16 only"),
        ({"compile": True, "ladder_candidate": "zero3 ckpt=on mb=4"}, "compiled blocks on zero3"),
    ],
)
def test_what_ladder_has_no_words_or_no_figures_for_is_left_out_with_the_reason(
    changes: dict[str, Any], reason: str
) -> None:
    assert re.search(reason, record_of(0, QLORA | changes)["left_out"])
