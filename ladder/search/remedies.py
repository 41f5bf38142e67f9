"""What would make a workload fit that does not: more or larger GPUs, shorter sequences, NVMe, fewer trained weights.

Remedies are predicted with calibrated models. Each one alone is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from ladder.backends.registry import MAIN, RUNGS_BY_NAME
from ladder.candidates import Candidate, Engine, Technique, divisors, engines_having
from ladder.events.outcome import Record
from ladder.search.belief import Belief, believe
from ladder.search.forecast import MOST_GPUS, SURE, num_nodes
from ladder.search.memory import MemoryPrediction, predict_memory
from ladder.search.space import Space
from ladder.techniques.registry import TECHNIQUES
from ladder.units import GIB, format_bytes
from ladder.workload.lora import Lora
from ladder.workload.trained import LoadIn
from ladder.workload.workload import Workload

_TOKENS = 64
"""Sequences are shortened to multiples of this. Chosen: suits kernels, and fine enough for users."""
_GPUS_OF_A_HOST = 8
"""GPUs that share one host and its memory. Chosen: as in most servers for training."""
_LORA_RANK = 16
"""Chosen: between PEFT's default of 8 and the 64 of Dettmers et al. 2023."""
_QLORA = f"--lora r={_LORA_RANK} --load-in 4bit"


@dataclass(frozen=True, kw_only=True)
class Remedies:
    """Each field alone would make the workload fit; None or False if it would not."""

    num_gpus: int | None = None
    """The fewest GPUs that divide the global batch; every eight have another host of the same size."""
    gpu_memory: int | None = None
    """Bytes that each GPU needs, with the same number of GPUs."""
    host_memory: int | None = None
    """Bytes that the host needs, if it is the host that is too small."""
    seq_len: int | None = None
    """The longest sequences, in tokens."""
    micro_batch: int | None = None
    """A smaller micro-batch, if the user asked only for larger ones."""
    techniques: tuple[Technique, ...] = ()
    """Each one alone is enough."""
    nvme: bool = False
    """The NVMe rungs, which are not supported here so far."""
    lora: int | None = None
    """The least bytes per GPU to train adapters of rank 16 on all linear layers, with frozen 16-bit weights."""
    lora_speed: int | None = None
    """Tokens per second of the fastest candidate that trains these."""
    qlora: int | None = None
    """The same with 4-bit weights, if 16 bits are too many."""
    qlora_speed: int | None = None
    has_lora: bool = False
    """The workload has adapters already."""

    def plain(self) -> dict[str, Any]:
        """All remedies as values for JSON: bytes, tokens, numbers; techniques by the option that asks for them."""
        facts = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "techniques"}
        switches = {
            technique.consent.switch: technique in self.techniques
            for technique in TECHNIQUES.values()
            if technique.consent.switch
        }
        allow = [technique.name for technique in self.techniques if not technique.consent.switch]
        return facts | switches | {"allow": allow}

    def sentence(self, *, on_cpu: bool = False) -> str:
        """All remedies in one sentence; empty if there is none. With `on_cpu`, GPUs are not mentioned."""
        size = -(-(self.gpu_memory or 0) // GIB)
        parts = [
            f"{self.num_gpus} GPUs" if self.num_gpus else "",
            (f"--gpu-memory {size}GiB" if on_cpu else f"GPUs of {size} GiB") if self.gpu_memory else "",
            f"{format_bytes(self.host_memory)} of host memory" if self.host_memory else "",
            f"--seq-len {self.seq_len}" if self.seq_len else "",
            f"--micro-batch {self.micro_batch}" if self.micro_batch else "",
            *(technique.consent.option(technique.name) for technique in self.techniques),
            "the NVMe rungs (--nvme-path, libaio)" if self.nvme else "",
            _in_words(f"--lora r={_LORA_RANK}", self.lora, self.lora_speed),
            _in_words("--load-in 4bit" if self.has_lora else _QLORA, self.qlora, self.qlora_speed),
        ]
        named = [part for part in parts if part]
        if not named:
            return ""
        listed = named[0] if len(named) == 1 else f"{', '.join(named[:-1])} or {named[-1]}"
        return f"What would fit, by prediction: {listed}."


def remedies(space: Space, records: Sequence[Record] = (), unsupported: Collection[str] = ()) -> Remedies:
    """What would make the workload of `space` fit, calibrated by `records`; `unsupported` are names of rungs."""
    needs = _Needs(space, believe(space, records))
    on_disk = [Engine(rung) for rung in RUNGS_BY_NAME.values() if "nvme" in rung.devices and rung.name in unsupported]
    on_cpu = space.device == "cpu"
    lora, lora_speed = qlora, qlora_speed = None, None
    if needs.hosts_ranks and not on_cpu and space.workload.script is None:
        lora, lora_speed = _adapters(space, None)
        qlora, qlora_speed = (None, None) if lora else _adapters(space, "4bit")
    return Remedies(
        num_gpus=None if on_cpu else needs.fewest_gpus(),
        gpu_memory=needs.smallest_gpu(),
        host_memory=needs.smallest_host(),
        seq_len=needs.longest_sequence(),
        micro_batch=1 if needs.micro_batch > 1 and needs.fit(micro_batch=1) else None,
        techniques=tuple(
            technique for technique in TECHNIQUES.values() if needs.fit(engines=_untried(technique, space))
        ),
        nvme=needs.fit(engines=on_disk),
        lora=lora,
        lora_speed=lora_speed,
        qlora=qlora,
        qlora_speed=qlora_speed,
        has_lora=space.workload.lora is not None,
    )


def _adapters(space: Space, load_in: LoadIn | None) -> tuple[int | None, int | None]:
    """The least bytes and the best tokens/s of candidates that are sure to fit with adapters; None if none is.

    Nothing is predicted for a workload that has such adapters already.
    """
    workload = space.workload
    if workload.load_in is not None or (workload.lora is not None and load_in is None):
        return None, None
    lora = workload.lora or Lora(rank=_LORA_RANK, alpha=_LORA_RANK)
    # Whoever offloads weights can train them all; and whoever asked for one rung may take another for adapters.
    plain = tuple(Engine(rung) for rung in MAIN.rungs if rung.offload_param == "none" and "nvme" not in rung.devices)
    adapted = replace(space, workload=replace(workload, lora=lora, load_in=load_in, freeze=()), engines=plain)
    belief = believe(adapted, ())
    sure = [
        outlook
        for engine in adapted.engines
        for candidate in adapted.of_engine(engine)
        if (outlook := belief.outlook(candidate)).fits >= SURE
    ]
    if not sure:
        return None, None
    fastest = max(outlook.speed.tokens_per_second for outlook in sure)
    return min(outlook.memory.peak for outlook in sure), round(fastest)


def _in_words(options: str, num_bytes: int | None, speed: int | None) -> str:
    if not num_bytes:
        return ""
    return f"{options} (from {format_bytes(num_bytes)} per GPU, about {speed:,} tokens/s)"


def _untried(technique: Technique, space: Space) -> list[Engine]:
    """Engines of the space with `technique` added, if they are not in the space already."""
    if technique.is_tried_everywhere:
        engines = engines_having(technique, space.engines, space)
    else:
        engines = technique.engines(space, space.engines, space.predicted_peak)
    return [engine for engine in engines if engine not in space.engines]


class _Needs:
    """The memory of the candidates that need least, for the space's workload or a changed one."""

    def __init__(self, space: Space, belief: Belief) -> None:
        self._space, self._calibration = space, belief.memory
        self.micro_batch = min(space.micro_batches)

    def fit(
        self,
        engines: Sequence[Engine] | None = None,
        *,
        world_size: int | None = None,
        seq_len: int | None = None,
        micro_batch: int | None = None,
    ) -> bool:
        """Whether any of `engines` (default: the space's) fits with a probability of 99 %, with the changes given."""
        space = self._space
        workload = replace(space.workload, seq_len=seq_len or space.workload.seq_len)
        world_size = world_size or space.world_size
        hosts, now = (num_nodes(ranks, _GPUS_OF_A_HOST) for ranks in (world_size, space.world_size))
        host = space.host_memory * hosts / now
        asked = replace(space, workload=workload, world_size=world_size, num_nodes=hosts)
        needs = (
            memory
            for engine in (space.engines if engines is None else engines)
            if all(each.suits(asked, engine.rung) for each in engine.techniques if each.shares_sequences)
            for memory in self._of(engine, workload, world_size, micro_batch or self.micro_batch)
        )
        return any(
            memory.upper <= space.memory_limit and space.on_host(memory.host, memory.upper) <= host for memory in needs
        )

    def fewest_gpus(self) -> int | None:
        divisible = divisors(self._space.workload.global_batch_size // self.micro_batch)
        more = [number for number in divisible if self._space.world_size < number <= MOST_GPUS]
        return next((number for number in more if self.fit(world_size=number)), None)

    def smallest_gpu(self) -> int | None:
        """Bytes per GPU; None if it is the host that is too small."""
        space = self._space
        hosted = [each for each in self._unchanged if space.on_host(each.host, each.upper) <= space.host_memory]
        enough = min((memory.upper for memory in hosted), default=0)
        return enough if enough > space.memory_limit else None

    def smallest_host(self) -> int | None:
        """Bytes of the host; None if it is the GPUs that are too small."""
        space = self._space
        fitting = [each for each in self._unchanged if each.upper <= space.memory_limit]
        enough = min((space.on_host(each.host, each.upper) for each in fitting), default=0)
        return enough if enough > space.host_memory else None

    @property
    def hosts_ranks(self) -> bool:
        """Whether the host has enough memory for the ranks' processes alone."""
        space = self._space
        plain, *_ = self._of(Engine(MAIN.rungs[0]), space.workload, space.world_size, self.micro_batch)
        return plain.host <= space.host_memory

    @cached_property
    def _unchanged(self) -> list[MemoryPrediction]:
        """The memory of each of the space's engines, without changes."""
        space = self._space
        return [
            memory
            for engine in space.engines
            for memory in self._of(engine, space.workload, space.world_size, self.micro_batch)
        ]

    def longest_sequence(self) -> int | None:
        """By bisection, as memory grows with the sequence length."""
        most = (self._space.workload.seq_len - 1) // _TOKENS
        return _largest(lambda number: self.fit(seq_len=number * _TOKENS), most) * _TOKENS or None

    def _of(self, engine: Engine, workload: Workload, world_size: int, micro_batch: int) -> list[MemoryPrediction]:
        """Predictions with checkpoints on the GPU, and with offloaded checkpoints if the space has them."""
        kept = _frugal(engine, workload, world_size, micro_batch)
        candidates = [kept, *(way.of(kept) for way in self._space.ways_of_checkpointing if way.is_more_frugal)]
        return [
            predict_memory(
                workload,
                candidate,
                world_size=world_size,
                device=self._space.device,
                calibration=self._calibration,
            )
            for candidate in candidates
        ]


def _frugal(engine: Engine, workload: Workload, world_size: int, micro_batch: int) -> Candidate:
    sequences = workload.global_batch_size * engine.ranks_of_a_sequence(world_size) // world_size
    every = 1 if workload.model.checkpoints else 0
    return Candidate(engine, every, micro_batch, max(1, sequences // micro_batch))


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` for which `holds`, which must be monotonic; 0 if there is none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
