"""The cases of benchmarks/search.py: simulated machines with workloads, and what is true of each candidate on them."""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

from ladder.backends.deepspeed.rungs import RUNGS
from ladder.backends.plain.rungs import PLAIN_RUNGS
from ladder.candidates import Candidate, Rung
from ladder.events.outcome import Record
from ladder.launch.base import Launcher
from ladder.machine.described import Machine
from ladder.machine.machine_speed import FROM_RATES
from ladder.search.decisions import Strategy
from ladder.search.space import Space
from ladder.simulation.launcher import SimulatedLauncher
from ladder.simulation.paper_machine import DIFFERENCES, SimulatedMachine, machine_files, read_machine
from ladder.simulation.physics import Physics
from ladder.techniques.keys import engine_in
from ladder.techniques.registry import TECHNIQUES, WAYS_OF_CHECKPOINTING
from ladder.tuning.problem import micro_batches_of, space_on
from ladder.tuning.run import tune_in_turn
from ladder.tuning.tuner import Tuner
from ladder.tuning.venues.base import OpenVenue
from ladder.workload.lora import Lora
from ladder.workload.source import resolve_model
from ladder.workload.trained import LoadIn
from ladder.workload.workload import Workload

ACCUMULATIONS = (1, 4, 16)
RANKS = (8, 16, 64, 256)
_MODELS = (
    "opt-125m",
    "llama-3.2-1b",
    "opt-1.3b",
    "llama-2-7b",
    "mistral-7b",
    "llama-3.1-8b",
    "qwen2.5-7b",
    "llama-2-13b",
)
_DIFFERENCES = (None,) * len(DIFFERENCES) + DIFFERENCES
"""In what a simulated machine differs from a step's description besides its speeds: every other one in nothing."""


@dataclass(frozen=True)
class Case:
    """One tune: a workload on a simulated machine, of which the search sees only `machine`."""

    name: str
    simulated: SimulatedMachine
    machine: Machine
    workload: Workload
    rungs: tuple[Rung, ...]

    def launcher(self) -> Launcher:
        return SimulatedLauncher(self.simulated, model=self.workload.model)

    @cached_property
    def physics(self) -> Physics:
        return Physics(self.simulated, self.workload, self.machine.world_size)

    def device_bytes(self) -> dict[str, int]:
        """What every candidate truly takes of the fullest device."""
        return {candidate.key: self.physics.truth(candidate).device for candidate in self.space().candidates}

    def speeds(self) -> dict[str, float]:
        """True tokens/s of the candidates that fit."""
        space, speeds = self.space(), {}
        nodes = -(-self.machine.world_size // self.simulated.num_gpus)
        for candidate in space.candidates:
            truth = self.physics.truth(candidate)
            fits = max(truth.device, truth.at_start) <= space.memory_limit
            fits &= truth.host <= self.simulated.host_memory * nodes
            fits &= truth.disk <= self.simulated.nvme_space * nodes
            if fits:
                seconds = truth.step_seconds(candidate.accumulation)
                seconds *= self.physics.limit_factor(truth, space.memory_limit)
                speeds[candidate.key] = self.workload.global_batch_size * self.workload.seq_len / seconds
        return speeds

    def space(self, *, beyond: bool = True, liger: bool = False) -> Space:
        """What the search sees: with or without what lies beyond the documented ladder, and Liger's kernels."""
        rungs = [rung for rung in self.rungs if rung.documented or beyond]
        micro_batches = micro_batches_of(self.workload, self.machine.world_size, None)
        space, _ = space_on(
            self.workload,
            self.machine,
            rungs,
            micro_batches,
            techniques=[TECHNIQUES["liger"]] if liger else [],
            checkpointing=tuple(WAYS_OF_CHECKPOINTING) if beyond else (),
        )
        return space


class Problem(Protocol):
    """What a search is held against, simulated or recorded."""

    @property
    def name(self) -> str: ...
    @property
    def machine(self) -> Machine: ...
    @property
    def workload(self) -> Workload: ...
    def space(self) -> Space: ...
    def launcher(self) -> Launcher: ...
    def device_bytes(self) -> dict[str, int]: ...
    def speeds(self) -> dict[str, float]: ...


class MemoryHistory:
    """A run folder that is forgotten: what the tuner writes, kept in memory."""

    def __init__(self) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        self.folder = Path(self._scratch.name)
        self.records: list[Record] = []
        self.seconds: dict[str, float] = {}
        self._starting: dict[str, float] = {}

    def next_trial(self) -> tuple[str, Path]:
        name = f"{len(self.seconds) + 1:04d}"
        self.seconds[name] = 0.0
        return name, self.folder / name

    def add(self, records: list[Record], _candidates: dict[str, Candidate], seconds: dict[str, float]) -> None:
        self.records += records
        trial = max(self.seconds)
        self.seconds[trial] = sum(seconds.values())
        self._starting[trial] = self.seconds[trial] - seconds.get("warmup", 0.0) - seconds.get("measure", 0.0)

    def search_seconds(self) -> float:
        """Of all trials but the proofs, which every strategy owes alike."""
        proofs = {record.trial for record in self.records if record.purpose == "proof"}
        return sum(seconds for trial, seconds in self.seconds.items() if trial not in proofs)

    def restart_seconds(self) -> float:
        """Of those, for starting and ending engines that an earlier trial had measured: the price of trials that end
        with the candidates they were asked for."""
        engines = {
            record.trial: engine_in(record.candidate_key).key for record in self.records if record.purpose == "measure"
        }
        trials = sorted(engines)
        again = [trial for index, trial in enumerate(trials) if engines[trial] in map(engines.get, trials[:index])]
        return sum(self._starting[trial] for trial in again)


def search(case: Problem, space: Space, strategy: Strategy) -> MemoryHistory:
    """A whole tune of `case`, through the tuner: of DeepSpeed's engines, then of all, if the space has both."""
    history, launcher = MemoryHistory(), case.launcher()

    def tuner(of: Space, _spent: float, _knob_trials: int | None) -> Tuner:
        return Tuner(
            place=OpenVenue(machine=case.machine, launcher=launcher),
            space=of,
            unsupported={},
            history=history,  # type: ignore[arg-type]
        )

    tune_in_turn(tuner, space, strategy, knob_trials=0)
    return history


def drawn_adapters(dice: random.Random) -> tuple[Lora, LoadIn | None]:
    """Adapters of all linear layers, whose other weights are held in 16 or in 4 bits."""
    return Lora(rank=dice.choice(RANKS)), dice.choice((None, "4bit"))


def simulated_rates(physics: Physics) -> dict[str, float]:
    """What `ladder doctor --measure` would find, each with a relative error of 5 %, which follows from the seed."""
    speed, dice = physics.speed, random.Random(f"{physics.seed} rates")
    found = {name: getattr(speed, name) for name in FROM_RATES if hasattr(speed, name)}
    found["flops"] *= speed.achievable
    if physics.world_size == 1:
        del found["link_bytes"]
    return {name: rate / FROM_RATES[name] * math.exp(dice.gauss(0, 0.05)) for name, rate in found.items()}


def simulated_cases(
    number: int,
    surprise: float = 1.0,
    first: int = 0,
    *,
    adapters: bool = False,
    plain: bool = False,
    known: bool = False,
) -> Iterator[list[Case]]:
    """`number` machines with a workload each, as one case for each accumulation. Every fourth has an NVMe drive; every
    other one, about, takes its steps in another way than described (`DIFFERENCES`).

    Machines are drawn by their number, from `first` on. With `adapters`, the same machines train the same models by
    LoRA or QLoRA; with `plain`, also without DeepSpeed. With `known`, the machine's speeds were measured before.
    """
    names = list(machine_files())
    for seed in range(first, first + number):
        dice = random.Random(f"case {seed}")
        simulated = read_machine(names[seed % len(names)])
        noise, differs = dice.uniform(0.005, 0.03), random.Random(f"structure {seed}").choice(_DIFFERENCES)
        simulated = simulated.model_copy(
            update={"seed": seed, "noise": noise, "surprise": surprise, "differs": differs if surprise else None}
        )
        world_size = dice.choice([size for size in (1, 2, 4, 8, 16) if size <= 2 * simulated.num_gpus])
        memory = int(simulated.gpu_memory * dice.choice((0.4, 0.6, 0.8, 1.0)))
        machine = simulated.machine(world_size, gpu_memory=memory)
        with_nvme = seed % 4 == 3
        rungs = tuple(rung for rung in RUNGS if with_nvme or "nvme" not in rung.devices)
        rungs += PLAIN_RUNGS if plain else ()
        model = resolve_model(dice.choice(_MODELS))
        longest = model.max_positions or 4096
        seq_len = dice.choice([length for length in (512, 1024, 2048, 4096) if length <= longest])
        sequences = dice.choice((2, 4, 6, 8))
        lora, load_in = drawn_adapters(dice) if adapters else (None, None)
        trained = f" {'QLoRA' if load_in else 'LoRA'} r={lora.rank}" if lora else ""
        cases = []
        for accumulation in ACCUMULATIONS:
            workload = Workload(
                model=model,
                task=model.task,
                seq_len=seq_len,
                global_batch_size=sequences * accumulation * world_size,
                dtype="fp16" if "V100" in simulated.gpu_name else "bf16",
                lora=lora,
                load_in=load_in,
            )
            gpus = f"{world_size} x {simulated.name}, {memory / 2**30:.0f} GiB"
            name = f"{seed}: {model.name}{trained} on {gpus}, A {accumulation}"
            case = Case(name, simulated, machine, workload, rungs)
            rates = simulated_rates(case.physics) if known else {}
            cases.append(replace(case, machine=replace(machine, rates=rates)))
        yield cases
