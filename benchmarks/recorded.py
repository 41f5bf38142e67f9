"""Recorded sweeps: what every candidate did on real GPUs, played back to the search under any cap and any global batch.

A sweep is a JSON file under benchmarks/results/sweeps/ with

- `workload`: `model` (a bundled shape or a config.json's content), `task`, `seq_len`, `dtype`, `optimizer`, and of
  adapters `lora` (peft's arguments) and `load_in`;
- `machine`: `gpu_name`, `world_size`, `memory_limit_gib`, `host_memory_gib`, `num_cores`;
- `sequences_per_rank`: of a rank's optimizer step before accumulation; `caps_gib`: the caps to play back;
- `whole`: false where candidates are missing that a sweep would have tried: shown, but not in the last line's figures;
- `knobs`: by rung, DeepSpeed settings that were not ours, if any;
- `rows`, or `trials_csv`, a path from there: as in trials.csv (rung, checkpointing, micro_batch, outcome,
  accumulate_seconds, boundary_seconds, peak_allocated_gib, peak_reserved_gib, peak_device_gib, host_gib);
- `probe_layers` and `probes`, rows of the same kind: what was seen of the candidates with so many layers, if anything.

Candidates that the recorded tune pruned count as out of memory. What fits under a cap follows from the peaks: allocated
memory, 4 % for fragmentation, and what lies outside PyTorch. What took a whole step at once is not played back at
larger global batches, where it would accumulate: record with a batch larger than the largest micro-batch that fits.
"""

from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import CHECKPOINTING, HALF, Candidate, Engine
from ladder.events.protocol import DoneEvent, FailedEvent, MeasuredEvent, PhaseEvent, TrialSpec
from ladder.events.step_policy import CandidateSpec
from ladder.events.trial_run import TrialRun
from ladder.launch.base import Deadlines, Launcher, Listener
from ladder.machine.described import Gpu, Machine
from ladder.search.cost import start_seconds
from ladder.search.space import Space
from ladder.techniques.keys import engine_in
from ladder.units import GIB, MIB
from ladder.workload.lora import lora_from_mapping
from ladder.workload.shapes import shape_from_config
from ladder.workload.source import resolve_model
from ladder.workload.workload import Workload

SWEEPS = Path(__file__).resolve().parent / "results" / "sweeps"
_FRAGMENTS = 1.04


@dataclass(frozen=True)
class RecordedSpace(Space):
    """The candidates that were recorded, and no others."""

    only: frozenset[str] = frozenset()

    def _in_order(self, engine: Engine) -> list[Candidate]:
        return [candidate for candidate in super()._in_order(engine) if candidate.key in self.only]


@dataclass(frozen=True)
class Sweep:
    """One file, at one cap and one global batch."""

    name: str
    facts: Mapping[str, Any]
    cap: int
    accumulation: int

    @property
    def is_whole(self) -> bool:
        return bool(self.facts.get("whole", True))

    @cached_property
    def workload(self) -> Workload:
        facts = dict(self.facts["workload"])
        model = facts.pop("model")
        known = isinstance(model, str)
        shape = resolve_model(model) if known else shape_from_config(model, name="recorded", source="file")
        batch = self._sequences * self.facts["machine"]["world_size"]
        lora = lora_from_mapping(facts.pop("lora")) if "lora" in facts else None
        return Workload(model=shape, global_batch_size=batch, lora=lora, **facts)

    @cached_property
    def machine(self) -> Machine:
        facts = self.facts["machine"]
        gpus = tuple(Gpu(f"GPU-{rank}", facts["gpu_name"], self.cap) for rank in range(facts["world_size"]))
        return Machine(
            device="cuda",
            world_size=facts["world_size"],
            gpus=gpus,
            memory_limit=self.cap,
            host_memory=int(facts["host_memory_gib"] * GIB),
            num_cores=facts["num_cores"],
            nvme_path=Path("/recorded"),
        )

    @cached_property
    def rows(self) -> dict[str, Mapping[str, Any]]:
        """By candidate key: all that were tried, whatever came of it."""
        tried = [row for row in self.facts["rows"] if row["outcome"] in ("fits", "gpu_oom", "host_oom", "pruned")]
        return {self._candidate(row).key: row for row in tried if self._tells(row)}

    @cached_property
    def probes(self) -> dict[str, Mapping[str, Any]]:
        """By candidate key: what was seen with a few layers."""
        seen = self.facts.get("probes", [])
        return {self._candidate(row).key: row for row in seen if self._tells(row)}

    def _tells(self, row: Mapping[str, Any]) -> bool:
        """Whether `row` is of a candidate at this global batch: one that took all at once did not accumulate."""
        if self._sequences % row["micro_batch"]:
            return False
        accumulates = self._sequences > row["micro_batch"]
        return row["outcome"] != "fits" or not accumulates or row["accumulate_seconds"] is not None

    @property
    def _sequences(self) -> int:
        """Of a rank's optimizer step."""
        return int(self.facts["sequences_per_rank"] * self.accumulation)

    def _candidate(self, row: Mapping[str, Any]) -> Candidate:
        knobs = self.facts.get("knobs", {}).get(row["rung"], {})
        engine = Engine(RUNGS_BY_NAME[row["rung"]], tuple(sorted(knobs.items())))
        accumulation = self._sequences // row["micro_batch"]
        every, is_offloaded = _checkpointing(row)
        return Candidate(engine, every, row["micro_batch"], accumulation, is_offloaded)

    def space(self) -> RecordedSpace:
        candidates = [self._candidate(row) for row in self.rows.values()]
        engines = {candidate.engine: None for candidate in candidates}
        return RecordedSpace(
            workload=self.workload,
            world_size=self.machine.world_size,
            device="cuda",
            memory_limit=self.cap,
            host_memory=self.machine.host_memory,
            engines=tuple(sorted(engines, key=lambda engine: list(RUNGS_BY_NAME).index(engine.rung.name))),
            micro_batches=tuple(sorted({candidate.micro_batch for candidate in candidates})),
            gpu_name=self.machine.gpu_name,
            num_cores=self.machine.num_cores,
            probe_layers=self.facts.get("probe_layers", 0),
            checkpointing=("1/2",) if any(candidate.checkpoint_every == HALF for candidate in candidates) else (),
            only=frozenset(self.rows),
        )

    def launcher(self) -> Launcher:
        return PlaybackLauncher(self)

    def device_bytes(self) -> dict[str, int]:
        """What every candidate takes of a device; of those that ran out, more than any cap."""
        return {key: self.needs(key) or 1 << 60 for key in self.rows}

    def needs(self, key: str, *, probe: bool = False) -> int | None:
        """Bytes of a device; None where it ran out without a cap of ours."""
        row = (self.probes if probe else self.rows).get(key)
        if row is None or row["outcome"] != "fits":  # what was not probed is as good as a probe that failed
            return None
        outside = (row["peak_device_gib"] - row["peak_reserved_gib"]) * GIB
        return int(min(row["peak_device_gib"] * GIB, row["peak_allocated_gib"] * _FRAGMENTS * GIB + outside))

    def speeds(self) -> dict[str, float]:
        """Tokens/s of what fits under the cap."""
        space, speeds = self.space(), {}
        for key, row in self.rows.items():
            needed = self.needs(key)
            if needed is not None and needed <= self.cap:
                accumulation = space.by_key[key].accumulation
                accumulating = (accumulation - 1) * row["accumulate_seconds"] if accumulation > 1 else 0.0
                tokens = self.workload.global_batch_size * self.workload.seq_len
                speeds[key] = tokens / (accumulating + row["boundary_seconds"])
        return speeds


class PlaybackLauncher(Launcher):
    """Plays a sweep's rows back as trials."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep, self._clock = sweep, time.monotonic()

    def run(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener) -> TrialRun:
        run = TrialRun(spec=spec, events=[[] for _ in range(spec.world_size)], requested=self._clock)
        run.started = self._clock
        rung = engine_in(spec.candidates[0].key).rung
        for events in run.events:
            events.append(PhaseEvent(t=self._clock, phase="engine"))
        space = self._sweep.space()
        weights = (space.shallow if spec.probe else space.workload).weights
        self._clock += start_seconds(rung, weights.total, weights.trained)
        for candidate in spec.candidates:
            if candidate is not spec.candidates[0] and candidate.is_left_out(self._first_step_seconds(run)):
                continue
            if not self._play(run, candidate, first=candidate is spec.candidates[0]):
                break
        else:
            for events in run.events:
                events.append(DoneEvent(t=self._clock))
        run.exits = dict.fromkeys(range(spec.world_size), 0)
        run.ended = self._clock
        return run

    @staticmethod
    def _first_step_seconds(run: TrialRun) -> float:
        first = next(event for event in run.events[0] if isinstance(event, MeasuredEvent))
        return first.step_seconds(run.spec.candidates[0].accumulation)

    def _play(self, run: TrialRun, candidate: CandidateSpec, *, first: bool) -> bool:
        key = candidate.key
        row = (self._sweep.probes if run.spec.probe else self._sweep.rows).get(key, {})
        needed, began = self._sweep.needs(key, probe=run.spec.probe), self._clock
        for events in run.events:
            events.append(PhaseEvent(t=began, phase="warmup", candidate=key))
        if needed is None or needed > run.spec.memory_limit:
            short = MIB if needed is None else needed - run.spec.memory_limit
            failure = FailedEvent(
                t=began,
                candidate=key,
                outcome="gpu_oom",
                moment="backward",
                message="recorded",
                bytes_asked=short + 2 * MIB,
                bytes_free=2 * MIB,
            )
            run.events[0].append(failure)
            return False
        self._clock += self._num_steps(run.spec, candidate, row, first) * _trial_step(row)
        gib = {name: int((row.get(f"{name}_gib") or 0.0) * GIB) for name in ("peak_allocated", "peak_reserved")}
        outside = int(row["peak_device_gib"] * GIB) - gib["peak_reserved"]
        reserved = needed - outside
        accumulates = run.spec.deepspeed["gradient_accumulation_steps"] > 1
        event = MeasuredEvent(
            t=self._clock,
            candidate=key,
            began=began,
            accumulate_seconds=[row["accumulate_seconds"] or 0.0] * 2 if accumulates else [],
            boundary_seconds=[row["boundary_seconds"]] * 2,
            skipped_steps=0,
            peak_allocated=gib["peak_allocated"],
            peak_reserved=reserved,
            peak_device=needed,
            outside_torch=outside,
            peak_host=int((row.get("host_gib") or 0.0) * GIB / run.spec.world_size),
            alloc_retries=0,
            losses=[],
        )
        for events in run.events:
            events.append(event)
        return True

    @staticmethod
    def _num_steps(spec: TrialSpec, candidate: CandidateSpec, row: Mapping[str, Any], first: bool) -> int:
        """Optimizer steps of warm-up and timing, by the same rules as in a trial; a recorded step has no noise."""
        whole = candidate.step_seconds(row["accumulate_seconds"], row["boundary_seconds"])
        one, before = _trial_step(row), whole if first else math.inf
        is_enough = spec.steps.is_enough(candidate, [whole], before, one, 2 * one)
        again = first and not candidate.loses(whole, spec.steps.hopeless_margin)
        return spec.steps.warmup + again + (1 if is_enough else spec.steps.minimum)

    def close(self) -> None:
        """There is nothing to end."""


def _checkpointing(row: Mapping[str, Any]) -> tuple[int, bool]:
    """As CHECKPOINTING has it, of a row; those of older tunes say only whether every layer is checkpointed."""
    if "checkpointing" in row:
        return CHECKPOINTING[row["checkpointing"]]
    return int(row["gradient_checkpointing"] in (True, "True")), False  # of a JSON file or of a CSV


def _trial_step(row: Mapping[str, Any]) -> float:
    """Seconds of an optimizer step in a trial, which accumulates twice at most."""
    return float(row["boundary_seconds"] + (row["accumulate_seconds"] or 0.0))


def rows_of(text: str) -> Iterator[dict[str, Any]]:
    """The candidates of a trials.csv; a rung that was not supported has none."""
    for row in csv.DictReader(text.splitlines()):
        if row["micro_batch"]:
            numbers = {
                name: float(row[name]) if row[name] else None
                for name in row
                if name.endswith(("_gib", "_seconds")) and name != "trial_seconds"
            }
            yield {
                **numbers,
                "rung": row["rung"],
                **{name: row[name] for name in row if name.endswith("checkpointing")},
                "micro_batch": int(float(row["micro_batch"])),
                "outcome": row["outcome"],
            }


def recorded_sweeps(
    accumulations: tuple[int, ...], *, every_cap: bool = True, folder: Path = SWEEPS
) -> Iterator[Sweep]:
    """Every file at every accumulation, and at every one of its caps or at the first."""
    for path in sorted(folder.glob("*.json")):
        facts = json.loads(path.read_text())
        if "caps_gib" not in facts:  # no sweep, but lies beside them
            continue
        if "trials_csv" in facts:
            facts["rows"] = list(rows_of((path.parent / facts["trials_csv"]).read_text()))
        for cap in facts["caps_gib"] if every_cap else facts["caps_gib"][:1]:
            for accumulation in accumulations:
                yield Sweep(f"{path.stem}, {cap} GiB, A {accumulation}", facts, int(cap * GIB), accumulation)
