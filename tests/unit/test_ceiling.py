"""A candidate is not doubted above what was measured with less work, or of the same steps with more memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from helpers import there
from helpers.searches import BILLION, fitting, make_space, space_of

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Engine
from ladder.events.outcome import Record
from ladder.search.auto import auto
from ladder.search.belief import Outlook, believe
from ladder.search.ceiling import plainer_rungs
from ladder.search.decisions import Measure
from ladder.search.space import Space
from ladder.techniques.registry import TECHNIQUES
from ladder.units import GIB
from ladder.workload.lora import Lora


@pytest.mark.parametrize(
    ("rung", "ranks", "names"),
    [
        ("zero0", 1, []),
        ("zero2", 4, []),
        ("zero1+opt-cpu", 4, ["zero1"]),
        ("zero1+opt-cpu", 1, ["zero0", "zero1"]),
        ("zero3", 4, ["zero2"]),
        ("zero2", 1, ["zero1"]),
        ("zero3", 1, ["zero0", "zero1", "zero2"]),
        ("zero3+opt-cpu", 1, ["zero0", "zero1", "zero2", "zero1+opt-cpu", "zero2+opt-cpu", "zero3"]),
        ("zero3+param-cpu+opt-cpu", 1, ["zero0", "zero1", "zero2", "zero3"]),
        ("zero3+param-cpu+opt-cpu+lean", 4, ["zero2", "zero3"]),
        ("ddp", 2, []),
        ("fsdp2+cpu", 2, ["fsdp2+no-reshard", "fsdp2"]),
    ],
)
def test_offload_and_gathering_are_left_out_and_with_one_rank_all_sharding(rung: str, ranks: int, names: list[str]):
    assert [each.name for each in plainer_rungs(RUNGS_BY_NAME[rung], ranks)] == names


def alike(space: Space, engine: Engine, *, slower: float) -> list[Record]:
    """Of every candidate of `engine`, as the prior predicts it or `slower`."""
    return [fitting(space, candidate, slower=slower) for candidate in space.of_engine(engine)]


def outlook(space: Space, records: Sequence[Record], key: str) -> Outlook:
    return believe(space, records).outlook(space.by_key[key])


def test_an_engine_with_offload_is_not_believed_to_be_faster_than_without_it_once_that_is_measured():
    space = make_space("zero2", "zero2+opt-cpu")
    key = "ckpt=on mb=4"
    before = outlook(space, (), f"zero2+opt-cpu {key}")
    records = alike(space, space.engines[0], slower=1.2)
    with_offload, without = (outlook(space, records, f"{engine.key} {key}") for engine in reversed(space.engines))
    assert with_offload.optimistic <= without.optimistic < before.optimistic
    measured = next(record for record in records if record.candidate_key == without.candidate.key)
    assert with_offload.gain_over(there(measured.tokens_per_second)) < 0.02


@pytest.mark.parametrize("rung", ["zero1", "zero1+opt-cpu"])
def test_what_leaves_work_out_bounds_the_same_with_it_and_with_offload(rung: str):
    unchecked = Engine(RUNGS_BY_NAME["zero1"]).having(TECHNIQUES["unchecked-gradients"])
    space = space_of(unchecked, Engine(RUNGS_BY_NAME["zero1"]), Engine(RUNGS_BY_NAME["zero1+opt-cpu"]))
    key = f"{rung} ckpt=on mb=4"
    assert outlook(space, (), key).ceilings == ()
    (ceiling,) = outlook(space, alike(space, unchecked, slower=1.3), key).ceilings
    assert ceiling.candidate.key == "zero1+unchecked-gradients ckpt=on mb=4"
    own = outlook(space, alike(space, space.engines[1], slower=1.3), ceiling.candidate.key)
    assert own.ceilings == ()


def test_only_an_engine_that_was_measured_is_a_ceiling():
    space = make_space("zero2", "zero2+opt-cpu", "zero3")
    of_another = alike(space, space.engines[2], slower=1.0)
    assert outlook(space, of_another, "zero2+opt-cpu ckpt=on mb=4").ceilings == ()
    with_it = [*of_another, *alike(space, space.engines[0], slower=1.0)]
    (ceiling,) = outlook(space, with_it, "zero2+opt-cpu ckpt=on mb=4").ceilings
    assert ceiling.candidate.key == "zero2 ckpt=on mb=4"
    itself = alike(space, space.engines[1], slower=1.0)
    assert outlook(space, [*with_it, itself[0]], "zero2+opt-cpu ckpt=on mb=4").ceilings == ()


@pytest.mark.parametrize("lora", [None, Lora(rank=16)], ids=["all weights", "adapters"])
def test_where_everything_fits_no_engine_with_offload_gets_a_trial(lora: Lora | None):
    """On one GPU with room for all, what saves memory has nothing to give: adapters' small optimizer least of all."""
    space = space_of(workload=replace(BILLION, lora=lora), memory_limit=1 << 40, micro_batches=(1, 2, 4, 8, 16))
    records: list[Record] = []
    tried: list[Engine] = []
    while isinstance(decision := auto(space, records), Measure):
        tried.append(decision.engine)
        records += [fitting(space, candidate) for candidate in decision.candidates]
    assert tried
    assert not [engine.key for engine in tried if engine.rung.devices or engine.rung.stage == 3]


@pytest.mark.parametrize(
    ("lora", "ranks", "tried"),
    [(Lora(rank=16), 1, 1), (Lora(rank=16), 2, 3), (None, 1, 2)],
    ids=["twins", "two ranks", "all weights"],
)
def test_one_stage_stands_for_all_where_one_rank_trains_adapters(lora: Lora | None, ranks: int, tried: int):
    workload = replace(BILLION, lora=lora)
    rungs = [Engine(RUNGS_BY_NAME[name]) for name in ("zero0", "zero1", "zero2")]
    space = space_of(*rungs, workload=workload, world_size=ranks, memory_limit=1 << 40, micro_batches=(4, 8))
    faster, records = 1.0, list[Record]()
    engines: set[Engine] = set()
    while isinstance(decision := auto(space, records), Measure):
        faster *= 0.8  # the later, the faster it would be
        engines.add(decision.engine)
        records += [fitting(space, candidate, slower=faster) for candidate in decision.candidates]
    assert len(engines) == tried


def test_what_one_twin_reached_the_other_does_not_exceed_even_once_it_was_measured_elsewhere():
    space = make_space("zero0", "zero1", workload=replace(BILLION, lora=Lora(rank=16)), world_size=1)
    reached = fitting(space, space.by_key["zero1 ckpt=on mb=4"], slower=1.5)
    measured = fitting(space, space.by_key["zero0 ckpt=off mb=2"])
    assert outlook(space, [reached, measured], "zero0 ckpt=on mb=4").most == reached.tokens_per_second


@pytest.mark.parametrize("ranks", [1, 2])
def test_fsdp2_is_measured_without_resharding_and_with_it_only_where_that_may_be_faster(ranks: int):
    names = ("fsdp2", "fsdp2+no-reshard")
    space = space_of(*(Engine(RUNGS_BY_NAME[name]) for name in names), world_size=ranks, memory_limit=1 << 40)
    records: list[Record] = []
    tried = set()
    while isinstance(decision := auto(space, records), Measure):
        tried.add(decision.engine.key)
        records += [fitting(space, candidate) for candidate in decision.candidates]
    assert tried == {"fsdp2+no-reshard"}


@pytest.mark.parametrize(
    ("engine", "changes", "bounded"),
    [
        ("zero2", {}, True),
        ("zero2", {"alloc_retries": 1}, False),
        ("zero2", {"peak_device": 79 * GIB}, False),
        ("zero2+opt-cpu", {}, False),
    ],
    ids=["usual", "the allocator was busy", "memory was nearly full", "the host decides"],
)
def test_half_a_micro_batch_is_no_faster_than_the_whole_where_nothing_slowed_that_down(engine, changes, bounded):
    space = make_space("zero2", "zero2+opt-cpu")
    record = fitting(space, space.by_key[f"{engine} ckpt=on mb=8"], slower=2.0, **changes)
    half = outlook(space, [record], f"{engine} ckpt=on mb=4")
    assert half.most == (record.tokens_per_second if bounded else math.inf)
    assert math.isinf(outlook(space, [record], f"{engine} ckpt=off mb=4").most)


@pytest.mark.parametrize(("size", "larger", "bounded"), [(8, 16, True), (1, 2, False)])
def test_a_larger_micro_batch_than_one_that_thrashed_is_no_faster_unless_it_promises_to_be(size, larger, bounded):
    space = make_space("zero3")  # which gathers parameters for each micro-step, however small
    thrashed = fitting(space, space.by_key[f"zero3 ckpt=on mb={size}"], slower=3.0, alloc_retries=5)
    assert outlook(space, [thrashed], f"zero3 ckpt=on mb={larger}").most == (
        thrashed.tokens_per_second if bounded else math.inf
    )


def test_what_thrashed_is_no_ceiling_of_what_needs_less_memory():
    space = make_space("zero2", "zero3")
    tried = space.by_key["zero2 ckpt=on mb=4"]
    steady, thrashed = (fitting(space, tried, slower=3.0, alloc_retries=retries) for retries in (0, 5))
    assert outlook(space, [steady], "zero3 ckpt=on mb=4").most == steady.tokens_per_second
    assert math.isinf(outlook(space, [thrashed], "zero3 ckpt=on mb=4").most)
