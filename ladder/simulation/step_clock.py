"""Seconds of a micro-step and of the optimizer: host, GPU, links and bus, each with a clock of its own.

The micro-step is played stretch by stretch (embeddings, layers, head, layers backwards). The host starts kernels and
runs ahead of the GPU as far as it can; stage 3's gatherings come in the order in which DeepSpeed asks for them; a
bucket of gradients goes out when it is full. What has to wait for what decides how long it all takes: there is no
formula for overlap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ladder.simulation.assignment import Assignment
from ladder.simulation.gathering import Gathering
from ladder.simulation.kernel_time import Chip, Kernels, Stretch

# Host work, in seconds. Measured on the hosts of benchmarks/results/sweeps (benchmarks/physics.py): what a step takes
# where its kernels are too short to matter.
_CHECKPOINT = 1.2e-3
"""For a layer that runs again: what torch.utils.checkpoint saves and restores."""
_HOOK = {0: 0.0, 1: 0.05e-3, 2: 0.25e-3, 3: 0.15e-3}
"""For one parameter's gradient."""
_MODULES = {True: 14, False: 11}
"""Modules of a block, with a gated net or without: stage 3 hooks each of them, before and after, in each pass."""
_MODULE_HOOK = 0.27e-3
_CROSSING_HOOK, _CROSSING_FETCH = 0.2e-3, 0.25e-3
"""For one parameter whose gradient goes to the host, and for one gathering of parameters that live there."""
_PARAMETER_STEP = 0.12e-3
"""For one parameter in the optimizer's step: norm, flattening, copies."""
_CONVERTED = 1.25e9
"""Bytes a second of fp32 master weights copied to 16-bit ones on the host: torch copies to fresh pageable memory first,
and one core converts. Measured: 1.2 to 1.4 GB/s in the three recorded sweeps of `zero3+param-cpu`."""
_ADAM_FIXED = 3e-3
_UNSHIELDED = 0.6
"""Of a bucket's reduction without `overlap_comm`, the share that kernels queued before it still cover (chosen)."""


@dataclass(frozen=True, kw_only=True)
class Rig:
    """A machine as one rank sees it; speeds are in bytes a second."""

    chip: Chip
    launch: float
    """Seconds of the host to start one kernel from Python."""
    host: float
    """How much slower than those measured this host runs Python: a factor."""
    link: float
    """Between ranks, the slowest part of the way."""
    latency: float
    """Seconds of a collective over all ranks with next to nothing to carry."""
    contention: float
    """How much of a transfer's time it takes from the kernels beside it."""
    bus: float
    """Between a GPU and the host."""
    dram: float
    """Of the host's memory, a rank's part of it."""
    drive: float
    """Of the disk, a rank's part of it."""


class StepClock:
    """The times of one assignment on one rig."""

    def __init__(self, assignment: Assignment, gathering: Gathering, rig: Rig) -> None:
        self._assignment, self._gathering, self._rig = assignment, gathering, rig
        self._kernels = Kernels(assignment, rig.chip)
        self._layers = assignment.workload.model.num_layers
        self._overlaps = bool(assignment.knobs.get("overlap_comm", False))
        self._host = self._gpu = self._wire = 0.0
        self._waiting = 0
        """Elements in the bucket."""

    def micro_step(self, *, boundary: bool) -> float:
        """Seconds of forward and backward; at the boundary stages 0 and 1 reduce what was accumulated."""
        self._host = self._gpu = self._wire = 0.0
        self._waiting = 0
        arrivals: dict[int, list[float]] = {}
        fetches = list(self._gathering.fetches)[::-1]
        for segment, (stretch, gradients, hooks) in enumerate(self._segments()):
            began = self._host
            self._host += stretch.kernels * self._rig.launch * self._rig.host + hooks * self._rig.host
            while fetches and fetches[-1].issued <= segment:
                fetch = fetches.pop()
                if self._assignment.parameter_device != "none":
                    self._host += _CROSSING_FETCH * self._rig.host
                self._wire = max(self._wire, began) + self._gather_seconds(fetch.elements)
                arrivals.setdefault(fetch.needed, []).append(self._wire)
            there = arrivals.get(segment, [0.0])
            ready = max(self._gpu, began, there[0])
            # What comes last is waited for by the last of the stretch's kernels only.
            self._gpu = max(ready + stretch.gpu, there[-1] + stretch.gpu / len(there), self._host)
            self._reduce(gradients, boundary=boundary)
        self._send(self._waiting, boundary=boundary)
        return max(self._host, self._gpu, self._wire)

    def update(self) -> float:
        """Seconds that the boundary takes beside its micro-step."""
        assignment, rig = self._assignment, self._rig
        owned = assignment.share if assignment.stage else assignment.elements
        hooks = self._assignment.network.num_tensors * _PARAMETER_STEP * rig.host
        if assignment.optimizer_device == "none":
            seconds = max(self._update_bytes() * owned / rig.chip.memory, hooks) + hooks / 2
            if assignment.parameter_device == "cpu":
                seconds += assignment.effects.master_bytes * owned / _CONVERTED
        elif assignment.optimizer_device == "cpu":
            seconds = hooks + self._cpu_adam(owned) + 2.0 * owned / rig.bus
            if assignment.stage == 1:
                seconds += 6.0 * owned / rig.bus  # gradients come down at the boundary: 16 bits, and fp32
        else:
            seconds = hooks + self._swapped(owned) + 2.0 * owned / rig.bus
        if assignment.stage in (1, 2):
            seconds += self._collective(2.0 * assignment.elements)
        return seconds

    def _segments(self) -> list[tuple[Stretch, int, float]]:
        """Work, elements of gradients that it makes, and further seconds of the host."""
        assignment, forward, backward = self._assignment, self._kernels.block_forward(), self._kernels.block_backward()
        own, tensors = self._block_elements(), sum(each.tensors for each in assignment.network.block)
        hook = _HOOK[assignment.stage] + (
            _CROSSING_HOOK if assignment.optimizer_device != "none" and assignment.stage > 1 else 0.0
        )
        pass_hooks = 0.0
        if assignment.stage == 3:
            pass_hooks = 2 * _MODULES[assignment.workload.model.gated_mlp] * _MODULE_HOOK
        moved = self._moved(forward)
        segments = [(self._kernels.lookup(backward=False), 0, 0.0)]
        segments += [(moved, 0, pass_hooks)] * self._layers
        head = 0 if assignment.workload.model.tied else assignment.network.head
        segments.append((self._kernels.ends(), head, pass_hooks / 7))
        for layer in reversed(range(self._layers)):
            work, hooks = self._moved(backward), pass_hooks + tensors * hook
            if assignment.recomputes(layer):
                work, hooks = work + moved, hooks + pass_hooks / 2 + _CHECKPOINT
            segments.append((work, own, hooks))
        return [*segments, (self._kernels.lookup(backward=True), assignment.network.table, 0.0)]

    def _block_elements(self) -> int:
        return sum(each.elements for each in self._assignment.network.block)

    def _moved(self, stretch: Stretch) -> Stretch:
        """With what a pass exchanges between ranks that share a sequence, and takes to the host or from there."""
        assignment, seconds = self._assignment, 0.0
        model = assignment.workload.model
        if assignment.effects.shares_sequence:
            for heads in (model.num_heads, model.num_kv_heads, model.num_kv_heads, model.num_heads):
                seconds += self._collective(2.0 * assignment.tokens * heads * model.head_dim)
        if assignment.candidate.offload_activations:
            seconds += 2.0 * assignment.tokens * model.hidden_size / self._rig.bus
        return Stretch(stretch.gpu + seconds, stretch.kernels)

    def _collective(self, num_bytes: float) -> float:
        """Of a ring: each rank sends all parts but its own; latency grows with the ranks, as a tree of them."""
        ranks = self._assignment.ranks
        if ranks == 1:
            return 0.0
        return num_bytes * (ranks - 1) / ranks / self._rig.link + self._rig.latency * math.log2(2 * ranks)

    def _gather_seconds(self, elements: int) -> float:
        """From disk, over the bus, then between the ranks; each brings its own part."""
        own = 2.0 * elements / self._assignment.ranks
        seconds = self._collective(2.0 * elements)
        if self._assignment.parameter_device != "none":
            seconds += own / self._rig.bus
        if self._assignment.parameter_device == "nvme":
            seconds += own / self._rig.drive
        return seconds

    def _reduce(self, elements: int, *, boundary: bool) -> None:
        """Gradients join the bucket, which goes out as often as it is full."""
        self._waiting += elements
        while self._waiting >= self._assignment.bucket:
            self._send(self._assignment.bucket, boundary=boundary)
            self._waiting -= self._assignment.bucket

    def _send(self, elements: int, *, boundary: bool) -> None:
        assignment = self._assignment
        if not elements or (assignment.stage < 2 and not boundary):
            return
        passes = 1 if assignment.stage == 3 else 2  # a reduce-scatter; an all-reduce is that and a gathering
        seconds = passes * self._collective(2.0 * elements) + 3 * 2.0 * elements / self._rig.chip.memory
        crossing = 0.0
        if assignment.optimizer_device != "none":
            own = elements / assignment.ranks
            crossing = {1: 0.0, 2: 4.0 * own, 3: 4.0 * own}[assignment.stage] / self._rig.bus
            crossing += 4.0 * own / self._rig.bus if boundary and assignment.stage > 1 else 0.0
        if assignment.stage == 0:
            self._gpu = self._wire = max(self._gpu, self._wire, self._host) + seconds  # after backward, not beside it
        elif self._overlaps:
            self._wire = max(self._wire, self._gpu) + seconds + crossing
            self._gpu += self._rig.contention * seconds
        else:
            self._gpu += (1 - _UNSHIELDED) * seconds + crossing if assignment.stage == 3 else seconds + crossing
            self._wire = max(self._wire, self._gpu)

    def _update_bytes(self) -> float:
        """Read and written for a parameter: flattened, cast, its norm, scaled, Adam, and the new 16-bit weight."""
        effects = self._assignment.effects
        gradient = effects.gradient_bytes or 2.0
        preparing = 4.0 + (2.0 + gradient if effects.gradient_bytes else 0.0) + 2.0 + 2.0 * gradient
        adam = gradient + 2.0 * effects.master_bytes + 2.0 * self._assignment.moments * effects.moment_bytes
        writing = effects.master_bytes + 2.0
        return preparing + adam * effects.update_passes + writing

    def _cpu_adam(self, owned: int) -> float:
        """Bound by the host's memory: the norm and scaling of gradients, Adam, and the 16-bit copy."""
        effects = self._assignment.effects
        gradient = effects.gradient_bytes or 2.0
        moved = 2.0 * gradient + gradient + 2.0 * effects.master_bytes
        moved += 2.0 * self._assignment.moments * effects.moment_bytes + effects.master_bytes + 2.0
        return _ADAM_FIXED + moved * owned / self._rig.dram

    def _swapped(self, owned: int) -> float:
        """Sub-group by sub-group: master, moments and gradient are read, Adam runs, master and moments are written."""
        states = (
            self._assignment.effects.master_bytes + self._assignment.moments * self._assignment.effects.moment_bytes
        )
        moved = 2.0 * states + 4.0 + (2.0 if self._assignment.parameter_device == "nvme" else 0.0)
        return moved * owned / self._rig.drive + self._cpu_adam(owned)
