"""All optimizers. A new one is added here, in one line."""

from __future__ import annotations

from ladder.optimizers.adam import ADAM
from ladder.optimizers.adamw import ADAMW
from ladder.optimizers.base import Optimizer
from ladder.optimizers.sgd import SGD
from ladder.registry import Registry

OPTIMIZERS = Registry[Optimizer](ADAMW, ADAM, SGD)
