# mypy: disable-error-code="import-untyped, import-not-found, misc"
"""Runs the training script that its arguments name, and says which modules stage 3 of DeepSpeed fetches as a whole."""

from __future__ import annotations

import runpy
import sys
from typing import Any

from deepspeed.utils import z3_leaf_module
from transformers import TrainerCallback
from transformers.trainer import DEFAULT_CALLBACKS


class ShowLeaves(TrainerCallback):
    def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
        leaves = [type(module).__name__ for module in model.modules() if z3_leaf_module(module)]
        print(f"fetched as a whole: {', '.join(leaves) or 'nothing'}", flush=True)


DEFAULT_CALLBACKS.append(ShowLeaves)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
