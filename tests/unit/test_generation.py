"""Generating, on paper: what ways take of memory, which are tried and in which order, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers import bundled_workload

from ladder.errors import UsageError
from ladder.events.protocol import GeneratedEvent
from ladder.generating.memory import cached_values, predicted, too_much
from ladder.generating.search import Tried, best, generates_something_else, next_way, reference_of
from ladder.generating.ways import WAYS_BY_NAME, Generation, sorted_out
from ladder.machine.described import bare_machine
from ladder.units import GIB

BY_NAME = WAYS_BY_NAME
STAGE_3 = [way.name for way in BY_NAME.values() if way.rung is not None]


INSTALLED = dict.fromkeys(("torch", "transformers", "deepspeed", "bitsandbytes"), "5.23")


def problem(model: str = "llama-2-7b", gpus: int = 2, memory: int = 80, host: int = 500, **more: Any) -> Generation:
    machine = bare_machine(gpus, memory * GIB, host_memory=host * GIB)
    facts = {"prompt_len": 512, "new_tokens": 128, "versions": INSTALLED, **more}
    return Generation(workload=bundled_workload(model), machine=machine, **facts)


def tried(way: str, batch: int = 1, *, seconds: float = 1.0, kind: Any = "fits", **more: Any) -> Tried:
    seen = GeneratedEvent(
        t=0.0,
        candidate="",
        load_seconds=1.0,
        prompt_seconds=0.1,
        new_seconds=seconds,
        peak_devices=[GIB],
        peak_host=GIB,
        tokens=[[5, 6]] * batch,
        model_class="Auto",
    )
    return Tried(way=way, batch=batch, trial="0001", kind=kind, seen=seen if kind == "fits" else None, **more)


@pytest.mark.parametrize(
    ("model", "values"),
    [
        ("llama-2-7b", 32 * 2 * 4096 * 640),
        ("llama-3.1-8b", 32 * 2 * 1024 * 640),  # 8 of 32 heads have keys
        ("gpt-oss-20b", 12 * 2 * 512 * (128 + 640)),  # every second layer has a window of 128 tokens
        ("t0-3b", 24 * 2 * 2048 * 640),  # the decoder's own tokens, and the prompt's
    ],
)
def test_the_cache_has_keys_and_values_of_every_layer_and_token(model: str, values: int) -> None:
    assert cached_values(bundled_workload(model).model, 512, 128) == values


def test_a_way_holds_its_part_of_the_weights_and_of_the_cache() -> None:
    asked = problem()
    one, copies, halves, stage_3, host = (
        predicted(BY_NAME[name], asked, 4) for name in ("one", "copies", "tp", STAGE_3[0], STAGE_3[1])
    )
    assert one.weights == copies.weights == 2 * asked.workload.model.num_parameters
    assert halves.weights == stage_3.weights == one.weights // 2
    assert (copies.cache, halves.cache, stage_3.cache) == (one.cache // 2,) * 3
    assert (host.weights, host.host) == (0, one.weights)
    assert stage_3.gathered == 2 * max(
        2 * asked.workload.model.num_block_parameters, asked.workload.model.largest_parameter
    )
    packed = predicted(BY_NAME["4bit"], asked, 4).weights
    assert 0.26 < packed / one.weights < 0.32  # embeddings and head stay in 16 bits


def test_weights_that_travel_get_no_trial_once_a_way_fits_whose_weights_stay() -> None:
    asked = problem()
    possible, unsupported = sorted_out(asked)
    assert [way.name for way in possible] == ["one", "copies", "layers", "tp", *STAGE_3[:2]]
    assert list(unsupported) == ["8bit", "4bit", STAGE_3[2]]
    assert next_way(possible, asked, [])[0] is BY_NAME["one"]
    done = [tried("one", kind="gpu_oom"), *(tried(name) for name in ("copies", "layers", "tp"))]
    way, left_out = next_way(possible, asked, done)
    assert way is None
    assert list(left_out) == STAGE_3[:2]
    assert next_way(possible, asked, [replace(each, kind="gpu_oom") for each in done])[0] is BY_NAME[STAGE_3[0]]
    named = replace(asked, asked=("one", STAGE_3[0]))
    assert next_way([BY_NAME[name] for name in named.asked], named, [tried("one")])[0] is BY_NAME[STAGE_3[0]]


def test_a_way_whose_weights_alone_are_too_much_gets_no_trial() -> None:
    asked = problem(memory=10, host=1)
    assert "its weights alone are 12.55 GiB, and a device has 10.00 GiB" in too_much(BY_NAME["one"], asked)
    assert not too_much(BY_NAME["tp"], asked)
    assert "the host has 1.00 GiB" in too_much(BY_NAME[STAGE_3[1]], asked)


def test_the_fastest_answers_unless_its_proof_failed_and_is_compared_with_another_exact_way() -> None:
    done = [tried("one", 2), tried("4bit", 2, seconds=0.5), tried("copies", 4, seconds=0.9)]
    answer = best(done, 128)
    assert answer is done[2]
    assert reference_of(done, answer) is answer  # no other way generated as many at once
    again = best([*done, tried("copies", 4, kind="crash", proof=True)], 128)
    assert again is done[1]
    assert reference_of(done, again) is done[0]
    assert generates_something_else([[1, 2], [3, 4]], [[9, 2], [8, 4]])
    assert not generates_something_else([[1, 2], [3, 4]], [[1, 9], [8, 4]])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "bert-base"}, "no head for generating"),
        ({"model": "opt-125m", "prompt_len": 2000}, "2048 positions"),
        ({"asked": (STAGE_3[0],), "gpus": 1}, "stage 3 on one rank without offload divides nothing"),
        ({"asked": (STAGE_3[1],), "load_in": "4bit"}, "cannot be divided or offloaded"),
        ({"asked": ("fast",)}, "choose from"),
        ({"asked": ("tp",), "gpus": 3}, "cannot be divided over 3 ranks"),
        ({"allow": ("fp8",)}, "allow 8bit or 4bit"),
        ({"load_in": "4bit", "versions": {**INSTALLED, "bitsandbytes": ""}}, "No way can be tried"),
    ],
)
def test_what_no_way_can_do_is_refused_in_one_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        sorted_out(problem(**changes))
