"""The coefficients of a candidate's time, from what its blocks were counted to do."""

from __future__ import annotations

from ladder.candidates import Candidate, Terms
from ladder.step.counted import USUAL_KERNELS, Device, counted_block, has_wide_loss
from ladder.workload.workload import CountedBlock, ModelShape, Workload

_MOVED_BY_LOSS, _MOVED_BY_A_NARROW_LOSS = 48.0, 20.0
"""Bytes that the loss reads and writes for each logit. Derived: the fp32 copy, the log-softmax and its gradient;
without the copy, and in 16 bits."""
_MOVED_FOR_A_BIAS = 25.0
"""Attention with a bias that is trained takes longer: for each score, as long as moving so many bytes. Measured: chosen
between T0-3B on one H100 and FLAN-T5-base on one H200 (benchmarks/results/runs)."""
_LAUNCHES_BESIDE, _LAUNCHES_OF_A_KERNEL = 0.49, 0.0048
"""Host work of a block over that for a Llama block: of its modules, and for each of its kernels. Measured: 1.8 to 2.3
ms in a micro-step of opt-125m and OPT-1.3B, whose blocks have 44 kernels, on H100 and H200, and 2.9 ms of Llama-3.2-1B
with 107 (benchmarks/results/runs and sweeps)."""
_LAUNCHES_FROM_PYTHON = 0.16
"""The same for a kernel that Python starts. Measured: 5.1 to 6.6 ms a block of Llama-3.2-1B with Liger's eight on H100
and H200 (benchmarks/results/runs and sweeps)."""


def terms_of(workload: Workload, candidate: Candidate, world_size: int, device: Device = "cuda") -> Terms:
    """The coefficients of the usual kernels, changed by the candidate's techniques."""
    techniques = candidate.engine.techniques
    block = counted_block(workload, techniques, device)
    terms = Terms(
        tokens=candidate.micro_batch * workload.sample_len // candidate.engine.ranks_of_a_sequence(world_size),
        traffic=block.moved + (block.moved_by_length + _MOVED_FOR_A_BIAS * block.biased_by_length) * workload.seq_len,
        moved_by_loss=_MOVED_BY_LOSS if has_wide_loss(workload) else _MOVED_BY_A_NARROW_LOSS,
        states=workload.state_bytes(),
        launches=_launches(workload.model, block, workload.seq_len),
    )
    for technique in techniques:
        terms = technique.costs(terms, workload, candidate, world_size)
    return terms


def _launches(model: ModelShape, block: CountedBlock, length: int) -> float:
    """Host work of a block over that for a Llama block; what experts add, `launch_seconds` knows."""
    own = _LAUNCHES_FROM_PYTHON * block.from_python
    kernels = USUAL_KERNELS if model.num_experts > 1 and not own else block.kernels - block.from_python
    kernels += block.kernels_by_length * length
    return _LAUNCHES_BESIDE + _LAUNCHES_OF_A_KERNEL * kernels + own
