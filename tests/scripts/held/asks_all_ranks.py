# mypy: disable-error-code="import-untyped, import-not-found, misc, no-untyped-call"
"""Joins the process group itself, asks all ranks in all ways, and divides a batch of 32 among as many as there are."""

import os

import torch
import torch.distributed as dist
from accelerate import PartialState
from few import Training

world, rank = PartialState().num_processes, int(os.environ["RANK"])
dist.init_process_group("gloo", rank=rank, world_size=world)
everybody: list[object] = [None] * world
dist.all_gather_object(everybody, "here")
assert everybody == ["here"] * world
told: list[object] = [None] * world
dist.gather_object("here", told if rank == 0 else None, dst=0)
assert rank > 0 or told == everybody
part: list[object] = [None]
dist.scatter_object_list(part, list(range(world)) if rank == 0 else None, src=0)
assert part == [rank]
name = ["of the first"] if rank == 0 else ["of another"]
dist.broadcast_object_list(name, src=0)
assert name == ["of the first"]
group = dist.new_group(backend="gloo")
dist.barrier(group)
dist.monitored_barrier(group)
batch = torch.tensor([4.0])
dist.all_reduce(batch)
training = Training(gradient_accumulation_steps=32 // int(batch))
for _epoch in range(4000):
    for each in training.loader:
        with training.accelerator.accumulate(training.model):
            training.step(each)
