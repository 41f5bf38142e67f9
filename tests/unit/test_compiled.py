"""torch.compile as a technique: where it is tried, what training is told, and what is said of its seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import bundled_workload, machine_with, space_on
from helpers.answers import answer

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.emit.accelerate import accelerate_config
from ladder.emit.trainer import trainer_arguments
from ladder.errors import UsageError
from ladder.events.verdict import _warnings
from ladder.techniques.compiled import COMPILE, COMPILE_WHOLE
from ladder.techniques.keys import engine_named
from ladder.techniques.liger import LIGER
from ladder.tuning.problem import problem_of
from ladder.tuning.technique_choices import require_effective_techniques, require_usable

LLAMA = bundled_workload("llama-2-7b")
TWO = machine_with(2)


def test_blocks_are_compiled_on_every_rung_without_deepspeed_and_whole_models_where_nothing_is_sharded() -> None:
    space, _ = space_on(LLAMA, TWO, tuple(RUNGS_BY_NAME.values()), (1,), techniques=[LIGER, COMPILE, COMPILE_WHOLE])
    names = {engine.name for engine in space.engines}
    assert {"ddp+compile", "ddp+liger+compile", "ddp+compile-whole", "fsdp2+compile", "fsdp2+cpu+compile"} <= names
    assert not {"fsdp2+compile-whole", "ddp+compile+compile-whole", "zero1+compile"} & names


def test_on_rungs_of_deepspeed_alone_it_is_refused_with_the_option_that_helps() -> None:
    with pytest.raises(UsageError, match=r"--allow compile has no effect here: .* --backend all or torch tries; leave"):
        require_effective_techniques([COMPILE], problem_of(LLAMA, TWO), [RUNGS_BY_NAME["zero1"]])
    require_effective_techniques([COMPILE], problem_of(LLAMA, TWO), [RUNGS_BY_NAME["ddp"]])


def test_without_a_compiler_it_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    require_usable(COMPILE, LLAMA, "cuda")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UsageError, match=r"--allow compile needs a C\+\+ compiler"):
        require_usable(COMPILE, LLAMA, "cuda")


@pytest.mark.parametrize(("name", "by_block"), [("ddp+compile", True), ("ddp+compile-whole", False)])
def test_accelerate_and_the_trainer_are_told_what_is_compiled(name: str, by_block: bool) -> None:
    engine, usual = engine_named(name), answer("zero1")
    found = replace(usual, candidate=replace(usual.candidate, engine=engine))
    assert accelerate_config(found, found.run_dir)["dynamo_config"] == {
        "dynamo_backend": "INDUCTOR",
        "dynamo_mode": "default",
        "dynamo_use_regional_compilation": by_block,
    }
    assert trainer_arguments(found, found.run_dir)["torch_compile"] is True
    (technique,) = engine.techniques
    assert technique.environment(2)["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] == str(by_block).lower()


def test_the_seconds_of_compiling_are_said_beside_the_measurement() -> None:
    seen = answer("zero1").measurement
    assert not [each for each in _warnings(seen, 1 << 60) if "compiling" in each]
    (said,) = _warnings(replace(seen, compile_seconds=41.6), 1 << 60)
    assert said == "compiling took 42 s of its first step, which is not counted"
