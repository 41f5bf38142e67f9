"""Simulates trials: no processes, no waiting, and the same events as from real ranks.

Time is simulated: it begins at the value of CLOCK_MONOTONIC when the launcher is created, and `now` advances with each
trial. A rank reports one step per candidate instead of one per micro-step.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

from ladder.candidates import Candidate
from ladder.events.outcome import OutcomeKind
from ladder.events.protocol import DoneEvent, Event, FailedEvent, MeasuredEvent, PhaseEvent, StepEvent, TrialSpec
from ladder.events.step_policy import CandidateSpec
from ladder.events.trial_run import DeviceUse, Ending, TrialRun
from ladder.launch.base import Deadlines, Launcher, Listener
from ladder.simulation.paper_machine import SimulatedMachine
from ladder.simulation.physics import Physics, Truth
from ladder.units import GIB, MIB
from ladder.workload.lora import Lora
from ladder.workload.shapes import shape_again, shape_from_config
from ladder.workload.workload import ModelShape, Workload

_SIGKILL, _SIGSEGV = -9, -11


class SimulatedLauncher(Launcher):
    """Simulates trials on one machine. Each machine always gives the same results for a workload, apart from noise."""

    def __init__(
        self,
        machine: SimulatedMachine,
        *,
        model: ModelShape | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """`model` is what trials train, where its shape does not follow from its configuration alone."""
        self._machine, self._model, self._cancelled = machine, model, cancelled
        self._clock = time.monotonic()
        self._physics: dict[object, Physics] = {}

    def now(self) -> float:
        """Seconds on the simulated clock."""
        return self._clock

    def run(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener) -> TrialRun:
        trial = _Trial(self._machine, self._physics_of(spec), spec, deadlines, listener, self._clock)
        trial.play(self._cancelled)
        self._clock = trial.run.ended
        return trial.run

    def close(self) -> None:
        """Nothing to do."""

    def _physics_of(self, spec: TrialSpec) -> Physics:
        config = repr(sorted(spec.model_config_json.items(), key=str))
        key = (config, repr(spec.lora), spec.load_in, spec.prepare_kbit, spec.freeze, spec.seq_len, spec.world_size)
        if key not in self._physics:
            self._physics[key] = Physics(self._machine, _workload(spec, self._model), spec.world_size, spec.device)
        return self._physics[key]


class _Trial:
    """The simulation of one trial."""

    def __init__(
        self,
        machine: SimulatedMachine,
        physics: Physics,
        spec: TrialSpec,
        deadlines: Deadlines,
        listener: Listener,
        clock: float,
    ) -> None:
        self._machine, self._physics, self._spec = machine, physics, spec
        self._deadlines, self._listener, self._t = deadlines, listener, clock
        self._dice = random.Random(f"{machine.seed} {machine.name} {spec.trial}")
        self._vocab_size = int(spec.model_config_json.get("vocab_size") or 32000)
        self._engine = physics.engine_of(spec)
        self.run = TrialRun(spec=spec, events=[[] for _ in range(spec.world_size)], requested=clock)

    def play(self, cancelled: Callable[[], bool]) -> None:
        """Simulate the trial from its request to the end of the last rank."""
        self._pass(0.3 + 0.002 * self._spec.world_size)
        self.run.started = self._t
        if self._begin():
            for number, candidate in enumerate(self._spec.candidates):
                if number > 0 and self._spec.is_late(self._t):
                    break
                if number > 0 and candidate.is_left_out(self._first_step_seconds()):
                    continue
                if not self._candidate(candidate, first=number == 0, cancelled=cancelled):
                    break
            else:
                if self._spec.proof:
                    self._prove()
        if len(self.run.exits) < self._spec.world_size:
            self._leave()
        self._pass(0.5)
        self.run.ended = self._t

    def _begin(self) -> bool:
        """Simulate process group, model and engine; False if the trial ended there."""
        first = self._named(self._spec.candidates[0])
        truth = self._physics.truth(first)
        model, engine = self._physics.start_seconds(first)
        for phase, seconds in (("process_group", 0.6), ("model", model), ("engine", engine)):
            self._tell_all(lambda t, phase=phase: PhaseEvent(t=t, phase=phase))  # type: ignore[misc]
            self._pass(seconds)
        nodes = -(-self._spec.world_size // self._machine.num_gpus)
        shortages: list[tuple[OutcomeKind, int, int]] = [
            ("host_oom", truth.host, self._machine.host_memory * nodes),
            ("disk_full", truth.disk, self._machine.nvme_space * nodes),
            ("gpu_oom", truth.at_start, self._spec.memory_limit),
        ]
        for kind, needed, there in shortages:
            if needed > there:
                self._fail(kind, None, "engine", asked=max(2 * MIB, needed // 8), short=needed - there)
                return False
        return True

    def _candidate(self, spec: CandidateSpec, *, first: bool, cancelled: Callable[[], bool]) -> bool:
        """Simulate one candidate; False if the trial ended with it."""
        candidate = self._named(spec)
        truth = self._physics.truth(candidate)
        factor = self._physics.limit_factor(truth, self._spec.memory_limit)
        self._tell_all(lambda t: PhaseEvent(t=t, phase="warmup", candidate=spec.key))
        if truth.device > self._spec.memory_limit:
            self._pass(truth.accumulate_seconds / 2)
            short = truth.device - self._spec.memory_limit
            self._fail("gpu_oom", spec.key, truth.moment, asked=max(2 * MIB, int(0.02 * truth.device)), short=short)
            return False
        if self._breaks_down(spec):
            return False
        began = self._t
        self._tell_all(lambda t: StepEvent(t=t, candidate=spec.key, seconds=truth.boundary_seconds * factor))
        if cancelled():
            self.run.stop = Ending(kind="cancelled", sentence="the tune was interrupted")
            self._kill()
            return False
        accumulate, boundary = self._timed(truth, factor, spec, first)
        self._measured(spec, truth, began, accumulate, boundary)
        return True

    def _timed(self, truth: Truth, factor: float, spec: CandidateSpec, first: bool) -> tuple[list[float], list[float]]:
        """Seconds of the timed micro-steps; the clock also advances for untimed steps."""
        policy, fewest = self._spec.steps, self._spec.deepspeed["gradient_accumulation_steps"]
        seconds = (truth.accumulate_seconds * factor, truth.boundary_seconds * factor)
        micro_steps = policy.micro_steps(spec, fewest, seconds[0] if fewest > 1 else None)

        def step(accumulation: int, slower: float = 1.0) -> tuple[float, float]:
            pair = (self._noisy(seconds[0] * slower), self._noisy(seconds[1] * slower))
            self._pass((accumulation - 1) * pair[0] + pair[1])
            return pair

        before, began = 0.0, self._t
        for number in range(policy.warmup + first):
            began, before = self._t, spec.step_seconds(*step(fewest, 1.3 if number == 0 else 1.0))
            is_long = self._spec.proof and self._t - began >= policy.long_seconds
            if is_long or spec.loses(before, policy.hopeless_margin):
                break
        self._tell_all(lambda t: PhaseEvent(t=t, phase="measure", candidate=spec.key))
        since, timed, enough = self._t, list[tuple[float, float]](), False
        while not enough:
            timed.append(step(micro_steps))
            steps = [spec.step_seconds(*pair) for pair in timed]
            enough = policy.is_enough(spec, steps, before, self._t - since, self._t - began)
            enough |= self._spec.is_late(self._t)
        return [pair[0] for pair in timed] if fewest > 1 else [], [pair[1] for pair in timed]

    def _noisy(self, seconds: float) -> float:
        """A step's time with noise; a few steps are disturbed."""
        late = 1.1 if self._dice.random() < 0.01 else 1.0
        return float(seconds * late * (1 + abs(self._dice.gauss(0, 1)) * self._machine.noise))

    def _measured(
        self, spec: CandidateSpec, truth: Truth, began: float, accumulate: list[float], boundary: list[float]
    ) -> None:
        less = 1 - self._machine.rank_spread if self._spec.world_size > 1 else 1.0
        host = truth.host // self._spec.world_size
        # The loss of an untrained model is the logarithm of its vocabulary.
        losses = [math.log(self._vocab_size) + 0.1 * self._dice.random() for _ in range(2)]
        for rank in range(self._spec.world_size):
            share = 1.0 if rank == 0 else less
            reserved = int(truth.reserved * share)
            self._tell(
                rank,
                MeasuredEvent(
                    t=self._t,
                    candidate=spec.key,
                    began=began,
                    accumulate_seconds=accumulate,
                    boundary_seconds=boundary,
                    peak_allocated=int(truth.allocated * share),
                    peak_reserved=reserved,
                    peak_device=reserved + truth.outside,
                    outside_torch=truth.outside,
                    peak_host=host,
                    alloc_retries=int(truth.device > 0.97 * self._spec.memory_limit),
                    losses=losses,
                ),
            )
        self.run.device_use[spec.key] = DeviceUse(utilisation=None, watts=None, peak_bytes=None)

    def _first_step_seconds(self) -> float:
        """Seconds of an optimizer step of the trial's first candidate, with its accumulation."""
        event = next(event for event in self.run.events[0] if isinstance(event, MeasuredEvent))
        return event.step_seconds(self._spec.candidates[0].accumulation)

    def _breaks_down(self, spec: CandidateSpec) -> bool:
        """Random failures of the machine: a rank that crashes without a report, or ranks that hang."""
        if self._dice.random() < self._machine.crash_rate:
            victim = self._dice.randrange(self._spec.world_size)
            self._pass(1.0)
            self.run.exits[victim] = _SIGSEGV
            self._kill()
            return True
        if self._dice.random() < self._machine.hang_rate:
            waited = self._deadlines.first_step
            self._pass(waited)
            sentence = f"no rank took a step for {waited:.0f} s in {spec.key}"
            self.run.stop = Ending(kind="hang", sentence=sentence, rank=0)
            self._kill()
            return True
        return False

    def _fail(self, kind: OutcomeKind, candidate: str | None, moment: str, *, asked: int, short: int) -> None:
        """Rank 0, which uses most memory, runs out; the others report a lost connection."""
        free = max(0, asked - short)
        self._tell(
            0,
            FailedEvent(
                t=self._t,
                candidate=candidate,
                outcome=kind,
                moment=moment,
                message=f"simulated {kind}: tried to allocate {asked / GIB:.2f} GiB",
                bytes_asked=asked + max(0, short - asked),
                bytes_free=free,
            ),
        )
        self._pass(0.1)
        for rank in range(1, self._spec.world_size):
            lost = "connection closed by peer"
            event = FailedEvent(
                t=self._t, candidate=candidate, outcome="crash", moment=moment, message=lost, consequence=True
            )
            self._tell(rank, event)
        self.run.exits = dict.fromkeys(range(self._spec.world_size), 1)

    def _prove(self) -> None:
        truth = self._physics.truth(self._named(self._spec.candidates[0]))
        for phase, seconds in (("evaluation", truth.accumulate_seconds / 2), ("gather", 0.2 + truth.allocated / 20e9)):
            self._tell_all(lambda t, phase=phase: PhaseEvent(t=t, phase=phase))  # type: ignore[misc]
            self._pass(seconds)

    def _leave(self) -> None:
        self._tell_all(lambda t: PhaseEvent(t=t, phase="teardown"))
        self._pass(0.4)
        self._tell_all(lambda t: DoneEvent(t=t))
        self.run.exits = dict.fromkeys(range(self._spec.world_size), 0)

    def _kill(self) -> None:
        self.run.killed = frozenset(range(self._spec.world_size)) - self.run.exits.keys()
        self.run.exits |= dict.fromkeys(self.run.killed, _SIGKILL)

    def _named(self, spec: CandidateSpec) -> Candidate:
        return Candidate(
            self._engine, spec.checkpoint_every, spec.micro_batch, spec.accumulation, spec.offload_activations
        )

    def _pass(self, seconds: float) -> None:
        self._t += seconds

    def _tell_all(self, make: Callable[[float], Event]) -> None:
        event = make(self._t)
        for rank in range(self._spec.world_size):
            self._tell(rank, event)

    def _tell(self, rank: int, event: Event) -> None:
        self.run.events[rank].append(event)
        self._listener(rank, event)


def _workload(spec: TrialSpec, model: ModelShape | None) -> Workload:
    """The workload of `spec`; the global batch is that of its first candidate."""
    first, config = spec.candidates[0], spec.model_config_json
    return Workload(
        model=shape_again(model, config) if model else shape_from_config(config, name="simulated", source="file"),
        task=spec.task,
        seq_len=spec.seq_len,
        global_batch_size=first.micro_batch * first.accumulation * (1 if spec.shares_sequences else spec.world_size),
        dtype=spec.dtype,
        optimizer=spec.optimizer,
        lora=None if spec.lora is None else Lora.from_peft(spec.lora),
        load_in=spec.load_in,
        prepare_kbit=spec.prepare_kbit,
        freeze=spec.freeze,
    )
