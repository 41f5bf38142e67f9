"""What measuring a simulated machine finds: the speeds of its rig, as `ladder doctor --measure` would see them."""

from __future__ import annotations

import math
import random

from ladder.simulation.physics import Physics

_COPIES = 1.09
"""A plain copy over element-wise kernels. Derived: 85 of 78 % of the data sheet."""
_BYTES_OF_ADAM = 28.0
"""Read and written per parameter (derived: weight, gradient and two moments in fp32, and all but the gradient back)."""


def simulated_rates(physics: Physics, ranks: int, noise: float = 0.05) -> dict[str, float]:
    """Rates as in `rates.rates_of`, each with a relative error of `noise`, which follows from the seed."""
    rig, dice = physics.rig, random.Random(f"{physics.seed} rates")
    rates = {
        "flops": rig.chip.flops,
        "device_bytes": rig.chip.memory * _COPIES,
        "pcie_bytes": rig.bus,
        "cpu_adam_parameters": ranks * rig.dram / _BYTES_OF_ADAM,
        "nvme_bytes": ranks * rig.drive,
    }
    if ranks > 1:
        rates["link_bytes"] = rig.link
    return {name: rate * math.exp(dice.gauss(0, noise)) for name, rate in rates.items()}
