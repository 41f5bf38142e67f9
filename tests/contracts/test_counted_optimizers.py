"""What is counted of a script's optimizer before it trains, against what it has after real steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from bitsandbytes.optim.adamw import AdamW8bit
from bitsandbytes.optim.lamb import LAMB
from bitsandbytes.optim.lion import Lion
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.optimization import Adafactor

from ladder.trial.script.optimizer_count import counted_optimizer


class OwnMomentum(torch.optim.Optimizer):
    """Keeps what it needs beside the state that torch gives it."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self.kept: dict[Any, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for each in self.param_groups[0]["params"]:
            kept = self.kept.setdefault(each, torch.zeros_like(each))
            kept.mul_(0.9).add_(each.grad)
            each.add_(kept, alpha=-self.param_groups[0]["lr"])


class PartlyMuon(torch.optim.Optimizer):
    """Matrices one way and all else another, told apart by their groups, as public ones have it."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        given = list(parameters)
        parts = {flag: [each for each in given if (each.ndim == 2) is flag] for flag in (True, False)}
        super().__init__([{"params": part, "flag": flag} for flag, part in parts.items()], {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                names = ("first",) if group["flag"] else ("first", "second")
                for name in names:
                    self.state[each].setdefault(name, torch.zeros_like(each))
                change = each.grad @ each.grad.mT @ each.grad if group["flag"] else each.grad
                each.add_(change, alpha=-group["lr"])


class SeveralInOne(torch.optim.Optimizer):
    """Two optimizers of torch's, each for some of the parameters."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        given = list(parameters)
        matrices, rest = ([each for each in given if (each.ndim == 2) is flag] for flag in (True, False))
        self.optimizers = [torch.optim.Muon(matrices), torch.optim.AdamW(rest)]
        super().__init__([group for each in self.optimizers for group in each.param_groups], {})

    def step(self, closure: Any = None) -> Any:
        for each in self.optimizers:
            each.step()


class Lookahead(torch.optim.Optimizer):
    """Slow weights beside those of another optimizer, whose groups it has."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        self.base = torch.optim.AdamW(parameters)
        super().__init__(self.base.param_groups, {})
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.base.step()
        for each in self.param_groups[0]["params"]:
            self.state[each].setdefault("slow", each.clone()).lerp_(each, 0.5)


Made = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, tuple[Made, bool]] = {
    "AdamW": (torch.optim.AdamW, False),
    "fused AdamW": (lambda given: torch.optim.AdamW(given, fused=True), False),
    "SGD": (lambda given: torch.optim.SGD(given, lr=0.1), False),
    "Lion": (Lion, False),
    "AdamW8bit": (AdamW8bit, False),
    "LAMB": (LAMB, True),
    "Adafactor": (lambda given: Adafactor(given, lr=1e-3, relative_step=False), True),
    "torch's Adafactor": (torch.optim.Adafactor, True),
    "Muon": (lambda given: torch.optim.Muon([each for each in given if each.ndim == 2]), True),
    "partly Muon": (PartlyMuon, True),
    "own": (OwnMomentum, False),
    "several in one, partly Muon": (SeveralInOne, True),
    "around another": (Lookahead, False),
}


def model_in(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).to(dtype)


def bytes_after_a_step(model: Any, optimizer: torch.optim.Optimizer) -> int:
    rows = torch.randint(128, (2, 16))
    model(input_ids=rows, labels=rows).loss.backward()
    optimizer.step()
    held = [optimizer, *getattr(optimizer, "optimizers", ()), getattr(optimizer, "base", optimizer)]
    states = [*(state for each in held for state in each.state.values()), getattr(optimizer, "kept", {})]
    found = {id(each): each for state in states for each in state.values() if isinstance(each, torch.Tensor)}
    return sum(each.numel() * each.element_size() for each in found.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["32 bits", "16 bits"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_states_of_an_optimizer_are_counted_before_it_has_any(name: str, dtype: torch.dtype) -> None:
    model = model_in(dtype)
    optimizer = OPTIMIZERS[name][0](model.parameters())
    counted = counted_optimizer(optimizer)
    assert counted is not None
    assert not optimizer.state
    states = counted.states if dtype == torch.float32 else counted.states_of_16_bits
    trained = sum(each.numel() for group in optimizer.param_groups for each in group["params"])
    assert states * trained == pytest.approx(bytes_after_a_step(model, optimizer), rel=0.02)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_whose_steps_go_by_the_shape_of_a_parameter_is_known(name: str) -> None:
    made, goes_by_shape = OPTIMIZERS[name]
    counted = counted_optimizer(made(model_in(torch.float32).parameters()))
    assert counted is not None
    assert counted.by_shape is goes_by_shape
    assert (counted.products > 0) is ("Muon" in name)


def test_counting_leaves_a_script_s_optimizer_and_its_model_as_they_are() -> None:
    model = model_in(torch.float32)
    before = [each.clone() for each in model.parameters()]
    optimizer, chance = OwnMomentum(model.parameters()), torch.get_rng_state()
    assert counted_optimizer(optimizer) is not None
    assert optimizer.kept == {}
    assert torch.equal(torch.get_rng_state(), chance)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_an_optimizer_that_cannot_step_by_itself_is_not_counted() -> None:
    assert counted_optimizer(torch.optim.LBFGS(model_in(torch.float32).parameters())) is None
    assert counted_optimizer(object()) is None
