"""What accelerate makes of an optimizer whose states go to the host, and what a rank lets it make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate.accelerator
import deepspeed.ops.adam
import pytest
import torch
from helpers.scripts import make_script
from helpers.values import tiny_trial
from transformers.optimization import Adafactor

from ladder.trial.backends.deepspeed import BACKEND, ReplacedOptimizerError
from ladder.workload.script import can_be_offloaded

MAPPED = "map_pytorch_optim_to_deepspeed"


class Noted:
    """Stands for DeepSpeed's Adam, which is compiled when it is made."""

    def __init__(self, groups: Any, **options: Any) -> None:
        self.options = options


@pytest.fixture(autouse=True)
def _noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed.ops.adam, "DeepSpeedCPUAdam", Noted)
    monkeypatch.setattr(accelerate.accelerator, MAPPED, getattr(accelerate.accelerator, MAPPED))


def mapped(kind: Any) -> Any:
    optimizer = kind([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    return getattr(accelerate.accelerator, MAPPED)(optimizer)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_accelerate_makes_an_adam_of_any_optimizer(kind: type) -> None:
    made = mapped(kind)
    assert isinstance(made, Noted)
    assert made.options["adamw_mode"] is (kind is torch.optim.AdamW)
    # A tune's settings keep SGD from being mapped at all.
    assert can_be_offloaded(make_script(optimizer=kind.__name__).facts) is True


def test_a_rank_lets_only_torch_s_adam_be_mapped(tmp_path: Path) -> None:
    BACKEND.take_hold(tiny_trial(tmp_path, 1))
    assert isinstance(mapped(torch.optim.AdamW), Noted)
    with pytest.raises(ReplacedOptimizerError, match="would replace the script's optimizer, Adafactor"):
        mapped(lambda parameters, lr: Adafactor(parameters, lr=lr, relative_step=False))
