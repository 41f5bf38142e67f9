"""The user's script as its command stands is a candidate, is tried first, and is what the answer is compared with."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import make_record, there
from helpers.scripts import make_script, script_workload
from helpers.searches import space_of

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Engine
from ladder.report.as_it_stands import compared, compared_without_deepspeed
from ladder.report.first_fit import compared as with_the_recipe
from ladder.search.space import Space, plain_as_it_stands
from ladder.techniques.liger import LIGER
from ladder.workload.script import OwnEngine

LIGER_ON = {"use_liger_kernel": True}
ENGINES = tuple(
    Engine(RUNGS_BY_NAME[name]) for name in ("zero2", "zero2+opt-cpu", "zero3", "ddp", "fsdp2+no-reshard", "fsdp2")
)


def space_with(engine: OwnEngine | None, batch: int = 8, **facts: Any) -> Space:
    script = make_script(engine=engine, micro_batch=4, accumulation=2, **facts)
    workload = script_workload(script, global_batch_size=batch)
    return space_of(*ENGINES, ENGINES[3].having(LIGER), workload=workload)


@pytest.mark.parametrize(
    ("engine", "key"),
    [
        (OwnEngine(), "ddp ckpt=off mb=4"),
        (OwnEngine(checkpointing=True), "ddp ckpt=on mb=4"),
        (OwnEngine(arguments=LIGER_ON), "ddp+liger ckpt=off mb=4"),
        (OwnEngine(2), "zero2 ckpt=off mb=4"),
        (OwnEngine(2, "cpu", checkpointing=True), "zero2+opt-cpu ckpt=on mb=4"),
        (OwnEngine(3), "zero3 ckpt=off mb=4"),
        (OwnEngine(3, "nvme"), None),
        (OwnEngine(3, fsdp2=True), "fsdp2 ckpt=off mb=4"),
        (OwnEngine(2, checkpointing=True, fsdp2=True), "fsdp2+no-reshard ckpt=on mb=4"),
        (OwnEngine(3, "cpu", "cpu", fsdp2=True), None),
        (OwnEngine(2, arguments=LIGER_ON), None),
        (None, None),
    ],
)
def test_what_a_script_does_by_itself_is_one_of_the_candidates(engine: OwnEngine | None, key: str | None) -> None:
    own = space_with(engine).own
    assert (own.key if own is not None else None) == key


def test_a_script_at_another_batch_or_in_another_precision_is_none_of_the_candidates() -> None:
    assert space_with(OwnEngine(), batch=16).own is None
    assert space_with(OwnEngine(), dtype="fp32").own is None
    assert space_of(*ENGINES).own is None


@pytest.mark.parametrize(
    ("speed", "said"),
    [
        (
            50.0,
            r"2.0 times as fast as your script as its command stands (ddp ckpt=off mb=4: 50 tokens/s in trial 0001).",
        ),
        (99.0, "Nothing found is clearly faster than your script as its command stands"),
        (125.0, "20% slower than your script as its command stands"),
        (None, "As its command stands, the script does not train here (ddp ckpt=off mb=4: ended in gpu_oom)."),
    ],
)
def test_the_answer_is_told_by_how_much_it_is_faster_than_the_script_as_it_stands(
    speed: float | None, said: str
) -> None:
    space = space_with(OwnEngine())
    own = make_record(there(space.own), "fits" if speed else "gpu_oom", tokens_per_second=speed)
    best = make_record(space.named("zero2 ckpt=off mb=4"), tokens_per_second=100.0, purpose="proof", trial="0002")
    assert said in (compared(space, [own, best], best) or "")
    plain = there(plain_as_it_stands(space, [own, best]))
    assert (plain["candidate"], plain["tokens_per_second"]) == ("ddp ckpt=off mb=4", speed)


def test_proofs_are_compared_where_the_script_s_own_way_was_proven_too() -> None:
    space = space_with(OwnEngine())
    own, other = there(space.own), space.named("zero2 ckpt=off mb=4")
    trials = [make_record(each, tokens_per_second=speed) for each, speed in ((own, 120.0), (other, 110.0))]
    proofs = [make_record(each, tokens_per_second=100.0, purpose="proof", trial="0002") for each in (own, other)]
    said = "Nothing found is clearly faster than your script as its command stands (ddp ckpt=off mb=4: 100 tokens/s in "
    assert compared(space, [*trials, *proofs], proofs[1]) == f"{said}its proof)."


def test_the_answer_without_deepspeed_is_compared_with_the_script_too() -> None:
    space = space_with(OwnEngine())
    own = make_record(there(space.own), "fits", tokens_per_second=50.0)
    best = make_record(space.named("zero2 ckpt=off mb=4"), tokens_per_second=100.0, purpose="proof", trial="0002")
    plain = make_record(space.named("ddp ckpt=off mb=2"), tokens_per_second=150.0, purpose="proof", trial="0003")
    said = "3.0 times as fast as your script as its command stands (ddp ckpt=off mb=4: 50 tokens/s in trial 0001)."
    assert compared_without_deepspeed(space, [own, best, plain], best) == said
    assert compared_without_deepspeed(space, [own, best, plain], plain) is None
    assert compared_without_deepspeed(space, [best, plain], best) is None


def test_the_fastest_with_an_fp32_copy_stands_beside_an_answer_that_trains_16_bit_weights() -> None:
    space = space_with(OwnEngine(), trains_16_bits=True)
    own = make_record(there(space.own), "fits", tokens_per_second=50.0)
    plain = make_record(space.named("ddp ckpt=off mb=2"), tokens_per_second=150.0, purpose="proof", trial="0003")
    said = compared_without_deepspeed(space, [own, plain], None) or ""
    assert said.endswith("Nothing that keeps an fp32 copy of the weights was tried and fits.")
    kept = make_record(space.named("fsdp2+no-reshard ckpt=off mb=4"), tokens_per_second=90.0, trial="0004")
    slower = make_record(space.named("zero2 ckpt=off mb=4"), tokens_per_second=80.0, trial="0005")
    said = compared_without_deepspeed(space, [own, slower, kept, plain], None) or ""
    kept_copy = "The fastest that keeps an fp32 copy of the weights: fsdp2+no-reshard ckpt=off mb=4, 90 tokens/s"
    assert said.endswith(f"{kept_copy} in its trial.")


def test_without_a_script_s_own_trial_the_answer_is_compared_with_the_documented_recipe() -> None:
    space = space_with(OwnEngine())
    best = make_record(space.named("zero2 ckpt=off mb=4"), tokens_per_second=100.0, purpose="proof")
    assert compared(space, [best], best) == with_the_recipe(space, [best], best)
    assert plain_as_it_stands(space, [best]) is None
