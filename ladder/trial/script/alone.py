"""A look at a script: one process, which the script takes for one of as many ranks as the training will have."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from ladder.trial.script.saves import called_by
from ladder.trial.wrapping import wrap

_OURS = ("ladder.", "functools")


def stand_for(world_size: int) -> None:
    """Join a process group of `world_size` ranks as its first. What it asks the others, they answer as it does."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)

    def summed(own: Any, tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **options: Any) -> Any:
        done = own(tensor, op, group, **options)
        if op == dist.ReduceOp.SUM:
            tensor.mul_(dist.get_world_size(group))
        return done

    def gathered(own: Any, tensor: Any, gather_list: Any = None, *more: Any, **options: Any) -> None:
        for each in gather_list or ():
            each.copy_(tensor)

    def scattered(own: Any, tensor: Any, scatter_list: Any = None, *more: Any, **options: Any) -> None:
        if scatter_list:
            tensor.copy_(scatter_list[0])

    def grouped(own: Any, ranks: Any = None, timeout: Any = None, backend: Any = None, **options: Any) -> Any:
        return own(ranks, timeout, None, **options)  # another backend would wait for the others

    def alone(own: Any, model: Any, *inputs: Any, **options: Any) -> Any:
        with model.no_sync():
            return own(model, *inputs, **options)

    def counted(own: Any) -> int:
        """All GPUs of a node, for a script that divides its batch among them: torchrun would show it all."""
        return int(os.environ["LOCAL_WORLD_SIZE"]) if own() and called_by(_OURS) is not None else int(own())

    wrap(torch.cuda, "device_count", counted)
    wrap(DistributedDataParallel, "forward", alone)
    answers: dict[str, Any] = {"all_reduce": summed, "gather": gathered, "scatter": scattered, "new_group": grouped}
    answers["monitored_barrier"] = lambda own, *_, **__: None
    for name, answer in answers.items():
        wrap(distributed_c10d, name, answer)  # where objects are gathered
        setattr(dist, name, getattr(distributed_c10d, name))


def welcome_joining() -> None:
    """From now on a script may join the process group itself, as under torchrun: it has joined."""

    def joined(own: Any, *arguments: Any, **options: Any) -> None:
        if not dist.is_initialized():
            own(*arguments, **options)

    wrap(dist, "init_process_group", joined)
