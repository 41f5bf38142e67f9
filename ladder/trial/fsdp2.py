"""FSDP2 in a rank: accelerate's plugin, on CPU ranks too."""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from ladder.backends.plain.config import FSDP
from ladder.events.protocol import TrialSpec
from ladder.trial.wrapping import wrap


def plugin_of(spec: TrialSpec) -> FullyShardedDataParallelPlugin | None:
    """The plugin that `spec` says, as the emitted files and the Trainer's arguments make it; None for another engine.

    From now on accelerate takes it on CPU ranks too, if `spec` is of these.
    """
    if FSDP not in spec.deepspeed:
        return None
    allow_on_cpu(spec)
    return FullyShardedDataParallelPlugin(**spec.deepspeed[FSDP])


def allow_on_cpu(spec: TrialSpec) -> None:
    """Let accelerate shard on CPU ranks, where it ignores FSDP and torch has it; nothing changes on GPUs."""
    if spec.device != "cpu" or FSDP not in spec.deepspeed or hasattr(AcceleratorState.__init__, "__wrapped__"):
        return

    def made(own: Any, state: Any, *arguments: Any, **options: Any) -> None:
        own(state, *arguments, **options)
        plugin = options.get("fsdp_plugin")
        if plugin is None or state.distributed_type != DistributedType.MULTI_CPU:
            return
        plugin.set_mixed_precision(state._mixed_precision)
        state.fsdp_plugin = plugin
        state.distributed_type = DistributedType.FSDP
        PartialState().distributed_type = DistributedType.FSDP  # every further look at the state takes it from there

    wrap(AcceleratorState, "__init__", made)
