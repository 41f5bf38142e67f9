"""What DeepSpeed does with gradients that are not finite, and what its check of them takes."""

from __future__ import annotations

import json
import subprocess
import sys

from helpers.processes import rank_alone

PROGRAM = """
import json
import deepspeed, torch
from torch.utils._python_dispatch import TorchDispatchMode

class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.calls += 1
        return function(*arguments, **(options or {}))

def told(stage, check):
    layers = [torch.nn.Linear(8, 8) for _ in range(50)]
    model = torch.nn.Sequential(*layers).to(torch.bfloat16)
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "zero_optimization": {"stage": stage}}
    config["bf16"] = {"enabled": True} if check else {"enabled": True, "check_grad_overflow": False}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1), config=config
    )

    def step(factor):
        engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)).sum() * factor)
        with Counted() as counted:
            engine.step()
        return counted.calls

    step(1.0)
    calls = step(1.0)
    step(float("inf"))
    finite = all(bool(torch.isfinite(each).all()) for each in model.parameters())
    return {"calls": calls / len(list(model.parameters())), "finite": finite}

print(json.dumps([[told(stage, check) for check in (True, False)] for stage in (1, 2)]))
"""


def test_the_check_saves_the_weights_from_an_infinite_gradient_and_takes_most_calls_of_a_step() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=rank_alone(), timeout=300
    )
    for checked, unchecked in json.loads(done.stdout.splitlines()[-1]):  # at stages 1 and 2
        assert (checked["finite"], unchecked["finite"]) == (True, False)
        assert checked["calls"] > 2 * unchecked["calls"]
