"""Rungs, engines and candidates: what a tune chooses from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import Literal

Device = Literal["none", "cpu", "nvme"]
Knob = tuple[str, bool | int]

# Step 7 of the documented ladder: what DeepSpeed's defaults spend on speed, given back. Upper bounds, in elements.
LEAN_KNOBS: tuple[Knob, ...] = (
    ("reduce_bucket_size", 10_000_000),
    ("stage3_max_live_parameters", 100_000_000),
    ("stage3_max_reuse_distance", 100_000_000),
    ("stage3_prefetch_bucket_size", 10_000_000),
    ("sub_group_size", 100_000_000),
)

# DeepSpeed holds one NVMe buffer for each parameter that stays on the GPU for its next use or is fetched ahead of it,
# and asserts when none is left. What it fetches ahead goes astray as soon as the order of the modules changes: when
# gradient checkpointing is switched, or an evaluation comes between steps. So none may stay, and none comes early
# (measured on a CPU: steps take 12 to 18 % longer, and never fail).
_ONE_AT_A_TIME: tuple[Knob, ...] = (("stage3_max_reuse_distance", 0), ("stage3_prefetch_bucket_size", 0))


@dataclass(frozen=True)
class Rung:
    """A step of the documented ladder: a ZeRO stage and where optimizer and parameters live."""

    name: str
    stage: int
    offload_optimizer: Device = "none"
    offload_param: Device = "none"
    knobs: tuple[Knob, ...] = ()
    documented: bool = True
    """Part of the recipe that is walked by hand; the others lie beyond it."""

    @property
    def devices(self) -> frozenset[Device]:
        return frozenset({self.offload_optimizer, self.offload_param}) - {"none"}

    @property
    def states_on_gpu(self) -> bool:
        """Whether ZeRO keeps optimizer states of its own, and on the GPU."""
        return self.stage > 0 and self.offload_optimizer == "none"

    @property
    def family(self) -> str:
        """The same for rungs that differ in knobs only: the same stage, the same devices."""
        return f"{self.stage} {self.offload_optimizer} {self.offload_param}"


# In the documented order: fastest claimed first, most frugal last.
RUNGS: tuple[Rung, ...] = (
    Rung("zero0", 0),
    Rung("zero1", 1),
    Rung("zero2", 2),
    # Gradients stay on the GPU until the boundary: they cross the bus once a step, not once a micro-step.
    Rung("zero1+opt-cpu", 1, "cpu", documented=False),
    Rung("zero2+opt-cpu", 2, "cpu"),
    Rung("zero3", 3),
    Rung("zero3+opt-cpu", 3, "cpu"),
    Rung("zero3+param-cpu", 3, "none", "cpu"),
    Rung("zero3+param-cpu+opt-cpu", 3, "cpu", "cpu"),
    Rung("zero3+param-cpu+opt-cpu+lean", 3, "cpu", "cpu", LEAN_KNOBS),
    Rung("zero3+opt-nvme", 3, "nvme"),
    Rung("zero3+param-nvme+opt-nvme", 3, "nvme", "nvme", _ONE_AT_A_TIME),
)
RUNGS_BY_NAME = {rung.name: rung for rung in RUNGS}
LIGER = "+liger"
"""In the name of an engine whose model runs on Liger's kernels."""
SHARING = "ulysses"
"""What is tried where it is allowed because the training script has to do its part: ranks share each sequence."""
ULYSSES = f"+{SHARING}"
"""In the name of such an engine."""
BF16_STATES, ADAM_8BIT = "bf16-states", "adam-8bit"
NUMERICS = (BF16_STATES, ADAM_8BIT)
"""What trains otherwise than the plain rung and is tried where it is allowed: the end of such an engine's name."""
_CAUTIONS = {
    BF16_STATES: "master weights and optimizer states are kept in bf16, as --allow bf16-states permits: small updates "
    "are rounded away",
    ADAM_8BIT: "Adam's moments are kept in 8 bits, as --allow adam-8bit permits: steps are a little longer or shorter",
}
HALF = 2
"""Partial checkpointing: every second layer is computed again."""
_KEY = re.compile(r"(?P<name>[^\[ ]+)(\[(?P<knobs>[^\]]+)\])? ckpt=(?P<ckpt>on|off|1/2|cpu) mb=(?P<size>[1-9]\d*)")
CHECKPOINTING = {"off": (0, False), "on": (1, False), f"1/{HALF}": (HALF, False), "cpu": (1, True)}
"""By name, `Candidate.checkpoint_every` and `Candidate.offload_activations`."""
_CHECKPOINTING_NAMES = {kind: name for name, kind in CHECKPOINTING.items()}


@dataclass(frozen=True)
class Engine:
    """A rung plus DeepSpeed knobs that differ from our defaults; one `deepspeed.initialize`."""

    rung: Rung
    knobs: tuple[Knob, ...] = ()
    liger: bool = False
    """The model runs on Liger's kernels: no logits are kept, and less of each block."""
    numerics: str = ""
    """One of NUMERICS: master weights and Adam's moments in bf16, or Adam's moments in 8 bits. Empty for neither."""
    ulysses: bool = False
    """All ranks work on the same sequences, each on its part of them: sequence parallelism."""

    @property
    def name(self) -> str:
        """The key without knobs."""
        kernels, shared = LIGER if self.liger else "", ULYSSES if self.ulysses else ""
        return self.rung.name + kernels + shared + (f"+{self.numerics}" if self.numerics else "")

    def ranks_of_a_sequence(self, world_size: int) -> int:
        """How many of the ranks work on one sequence."""
        return world_size if self.ulysses else 1

    @property
    def key(self) -> str:
        if not self.knobs:
            return self.name
        return f"{self.name}[{','.join(f'{name}={value}' for name, value in sorted(self.knobs))}]"

    @property
    def cautions(self) -> tuple[str, ...]:
        """What the user has to know of it where it is not used as the plain rung is."""
        found = []
        if self.numerics:
            found.append(
                f"{_CAUTIONS[self.numerics]}, so hold the loss against that of an ordinary run before a long one"
            )
        if self.ulysses:
            found.append(
                f"ranks share each sequence, as --allow {SHARING} permits: train with the Trainer in this environment "
                "for one epoch, on data with position_ids and without packing; evaluation is not shared, and was "
                "shown to fit with sequences as long as a rank's part alone"
            )
        return tuple(found)

    @property
    def states(self) -> str:
        """The same for engines whose parameters, gradients and optimizer are kept alike: the rest are activations."""
        return replace(self, liger=False, ulysses=False).key


@dataclass(frozen=True)
class Candidate:
    """An engine with a way of checkpointing and a micro-batch; accumulation follows from the global batch."""

    engine: Engine
    checkpoint_every: int
    """Layers of which one is computed again in backward: 1 for each of them, 0 for none."""
    micro_batch: int
    """Sequences a rank takes at once, or all that share them."""
    accumulation: int
    """Micro-batches to one optimizer step."""
    offload_activations: bool = False
    """What checkpointing keeps, the input of each layer, waits for backward in the host's memory."""

    @property
    def key(self) -> str:
        return f"{self.engine.key} {self.variant}"

    @property
    def variant(self) -> str:
        return variant_name(self.checkpointing, self.micro_batch)

    @property
    def checkpointing(self) -> str:
        """In a word: on, off, the share of the layers, or cpu where what is kept is offloaded."""
        return checkpointing_name(self.checkpoint_every, self.offload_activations)

    @property
    def checkpointed(self) -> float:
        """The share of the layers that are computed again."""
        return 1 / self.checkpoint_every if self.checkpoint_every else 0.0

    @property
    def setup(self) -> tuple[Engine, bool]:
        """What all candidates of one trial have in common: the engine, and whether it accumulates.

        An engine that does keeps gradients from micro-step to micro-step also for a candidate that does not, which
        would seem to need more memory than it does. Stage 3 has room for them all in any case.
        """
        return self.engine, self.accumulation > 1 or self.engine.rung.stage == 3

    def sequences(self, world_size: int) -> int:
        """What all ranks together take in an optimizer step: the global batch."""
        return self.micro_batch * self.accumulation * world_size // self.engine.ranks_of_a_sequence(world_size)

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether any layer is."""
        return self.checkpoint_every > 0


def checkpointing_name(checkpoint_every: int, offload_activations: bool) -> str:
    """As `Candidate.checkpointing`. KeyError for what no candidate has."""
    return _CHECKPOINTING_NAMES[checkpoint_every, offload_activations]


def variant_name(checkpointing: str, micro_batch: int) -> str:
    """What a candidate's key says beside its engine."""
    return f"ckpt={checkpointing} mb={micro_batch}"


def divisors(number: int) -> list[int]:
    """All divisors of `number`, ascending."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    # Each has a partner above the root: to count up to `number` itself takes hours for a large batch.
    return sorted({*small, *(number // d for d in small)})


def candidate_of(key: str, batch: int, world_size: int = 1) -> Candidate:
    """The candidate whose `key` this is, whatever its knobs, at a global `batch` on so many ranks.

    ValueError for a text that is no candidate's key.
    """
    match = _KEY.fullmatch(key)
    if match is None or rung_name(match["name"]) not in RUNGS_BY_NAME:
        raise ValueError(f"{key!r} is no candidate's key")
    pairs = [pair.split("=") for pair in match["knobs"].split(",")] if match["knobs"] else []
    knobs = tuple((name, value == "True" if value in ("True", "False") else int(value)) for name, value in pairs)
    engine, size = engine_named(match["name"], knobs), int(match["size"])
    every, is_offloaded = CHECKPOINTING[match["ckpt"]]
    at_once = Candidate(engine, every, size, 1, is_offloaded)
    return replace(at_once, accumulation=batch // at_once.sequences(world_size))


def rung_name(engine_name: str) -> str:
    """The name of the rung of an engine of this name."""
    return _without_numerics(engine_name).removesuffix(ULYSSES).removesuffix(LIGER)


def engine_named(name: str, knobs: tuple[Knob, ...] = ()) -> Engine:
    """The engine of this `name`. KeyError for none."""
    kept = _without_numerics(name)
    return Engine(
        RUNGS_BY_NAME[rung_name(name)],
        knobs,
        liger=kept.removesuffix(ULYSSES).endswith(LIGER),
        numerics=_numerics_in(name),
        ulysses=kept.endswith(ULYSSES),
    )


def _without_numerics(engine_name: str) -> str:
    return engine_name.removesuffix(f"+{_numerics_in(engine_name)}")


def _numerics_in(engine_name: str) -> str:
    return next((each for each in NUMERICS if engine_name.endswith(f"+{each}")), "")


def engines_of(rung: Rung, *, liger: bool = False, numerics: Sequence[str] = ()) -> list[Engine]:
    """The engine of `rung`; with `liger`, that on Liger's kernels too; each with each of `numerics` as well."""
    kernels = (False, True) if liger else (False,)
    return [Engine(rung, liger=on_liger, numerics=each) for on_liger in kernels for each in ("", *numerics)]


def candidates_of(
    engine: Engine, sequences: int, micro_batches: Sequence[int], *, partial: bool = False
) -> Iterator[Candidate]:
    """Every candidate of `engine`: with and without checkpointing, `partial` too if wanted, at each micro-batch.

    `sequences` are those of an optimizer step that a rank takes, or all that share them; each micro-batch divides it.
    """
    for every in (1, HALF, 0) if partial else (1, 0):
        for micro_batch in micro_batches:
            yield Candidate(engine, every, micro_batch, sequences // micro_batch)
