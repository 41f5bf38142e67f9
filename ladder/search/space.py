"""The space of one tune, and which candidates the history rules out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ladder.backends.registry import backend_of, is_main
from ladder.candidates import Candidate, Engine, Problem, candidates_of
from ladder.candidates.checkpointing import WayOfCheckpointing
from ladder.events.outcome import MEMORY_OUTCOMES, Outcome, Record
from ladder.search.memory import expected_peak
from ladder.techniques.keys import candidate_of
from ladder.techniques.registry import WAYS_OF_CHECKPOINTING
from ladder.workload.script import OwnEngine
from ladder.workload.shapes import with_layers
from ladder.workload.workload import Workload

_BROKEN_AFTER = 2
"""After this many crashes or hangs without any success, an engine or a technique counts as broken. Chosen: a single one
may be chance, or one candidate's fault."""
PARITY = "parity"
"""The moment of a failure because losses differ from the reference engine's."""
REFUSED = "refused"
"""The moment of a failure without a trial, because the host has too little memory."""
_SETUP_MOMENTS = frozenset({"process_group", "model", "engine"})


@dataclass(frozen=True, kw_only=True)
class Space(Problem):
    """All candidates of a tune. The fields are stored; everything else is derived from them."""

    engines: tuple[Engine, ...]
    """The engines that this machine supports, in the documented order."""
    micro_batches: tuple[int, ...]
    """Ascending divisors of the sequences that a rank has per step."""
    tolerance: float = 0.02
    """The search ends when no candidate left is likely to be faster than the best by more than this fraction."""
    probe_layers: int = 0
    """Layers of the model in a probe of an engine; 0 for no probes."""
    checkpointing: tuple[str, ...] = ()
    """Names of the ways of checkpointing to try besides all layers and none."""

    @property
    def sequences_per_rank(self) -> int:
        return self.workload.global_batch_size // self.world_size

    def named(self, key: str) -> Candidate:
        """The candidate with this key, in the space or not. ValueError for a text that is not a candidate's key."""
        return candidate_of(key, self.workload.global_batch_size, self.world_size)

    def on_host(self, host: int, held: int) -> int:
        """Host memory of all ranks: `host` with GPUs; with CPU ranks, what each has `held` as its device memory.

        The processes of CPU ranks themselves are not counted.
        """
        return host if self.device == "cuda" else held * self.world_size

    @property
    def ways_of_checkpointing(self) -> list[WayOfCheckpointing]:
        """The ways in `checkpointing` that suit this workload."""
        if not self.workload.model.checkpoints:
            return []
        return [way for name in self.checkpointing if (way := WAYS_OF_CHECKPOINTING[name]).suits(self)]

    @cached_property
    def shallow(self) -> Workload:
        """The workload of a probe: the same with `probe_layers` layers."""
        return replace(self.workload, model=with_layers(self.workload.model, self.probe_layers))

    @cached_property
    def own(self) -> Candidate | None:
        """What the user's script does as its command stands; None without a script, or if that is not among these."""
        script = self.workload.script
        if script is None or script.facts.engine is None or script.facts.precision != self.workload.dtype:
            return None
        facts, engine = script.facts, script.facts.engine
        if self.workload.global_batch_size != facts.own_batch(self.world_size):
            return None
        checkpointing = "on" if engine.checkpointing else "off"
        return next(
            (
                candidate
                for candidate in self.candidates
                if candidate.micro_batch == facts.micro_batch
                and candidate.checkpointing == checkpointing
                and _is_on(candidate.engine, engine)
            ),
            None,
        )

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        return tuple(candidate for engine in self.engines for candidate in self.of_engine(engine))

    @cached_property
    def by_key(self) -> dict[str, Candidate]:
        """The space's candidates by key. Candidates with other knobs can be looked up too; KeyError for other texts."""
        return _Candidates(self)

    @cached_property
    def _sorted(self) -> dict[Engine, tuple[Candidate, ...]]:
        return {engine: tuple(self._in_order(engine)) for engine in self.engines}

    def of_engine(self, engine: Engine) -> tuple[Candidate, ...]:
        """The engine's candidates in ascending predicted memory."""
        return self._sorted[engine]

    def _in_order(self, engine: Engine) -> list[Candidate]:
        sharing = engine.ranks_of_a_sequence(self.world_size)
        # Ranks that share sequences take one at a time: with memory for more, they need not share.
        sizes = (1,) if engine.shares_sequences else self.micro_batches
        usual = [
            candidate
            for candidate in candidates_of(engine, self.sequences_per_rank * sharing, sizes)
            if self.workload.model.checkpoints or candidate.checkpointing == "off"
            if candidate.accumulation > 1 or not any(each.only_accumulates for each in engine.techniques)
        ]
        ways = self.ways_of_checkpointing
        others = [other for way in ways for other in way.candidates(self, usual, self.predicted_peak)]
        return sorted([*usual, *others], key=lambda candidate: (self.predicted_peak(candidate), candidate.micro_batch))

    def predicted_peak(self, candidate: Candidate) -> int:
        """Predicted bytes of a rank before any trial."""
        return expected_peak(self.workload, candidate, world_size=self.world_size, device=self.device)


def _is_on(engine: Engine, own: OwnEngine) -> bool:
    """Whether `engine` is what a script trains on by itself, with as many parts on the host."""
    rung = engine.rung
    if is_main(rung) is (own.stage is None or own.fsdp2) or rung.stage != (own.stage or 0):
        return False
    places = (own.offload_optimizer, own.offload_param) == (rung.offload_optimizer, rung.offload_param)
    arguments = {name: value for each in engine.techniques for name, value in each.trainer_arguments().items()}
    return places and arguments == own.arguments and len(engine.techniques) == len(arguments)


def of_main_backend(space: Space) -> Space:
    """`space` with the engines of the main backend, DeepSpeed."""
    return replace(space, engines=tuple(each for each in space.engines if is_main(each.rung)))


class _Candidates(dict[str, Candidate]):
    """A space's candidates by key. Candidates with other knobs are not in the space, but can be looked up too."""

    def __init__(self, space: Space) -> None:
        super().__init__((candidate.key, candidate) for candidate in space.candidates)
        self._space = space

    def __missing__(self, key: str) -> Candidate:
        try:
            return self._space.named(key)
        except ValueError:
            raise KeyError(key) from None


@dataclass(frozen=True)
class RuledOut:
    """Why a candidate need not be tried, and the record that shows it."""

    record: Record
    reason: str


def measured(records: Sequence[Record]) -> dict[str, Record]:
    """The last record of each candidate that was measured (not probed or proven)."""
    return {record.candidate_key: record for record in records if record.purpose == "measure"}


def as_it_stands(space: Space, records: Sequence[Record]) -> Record | None:
    """The trial of the user's script as its command stands; None where there was none."""
    return measured(records).get(space.own.key) if space.own is not None else None


def plain_as_it_stands(space: Space, records: Sequence[Record]) -> dict[str, Any] | None:
    """The same for JSON."""
    own = as_it_stands(space, records)
    if own is None:
        return None
    speed = own.tokens_per_second
    return {
        "candidate": own.candidate_key,
        "outcome": own.outcome.kind,
        "tokens_per_second": round(speed, 1) if speed else None,
        "measured_in_trial": own.trial,
    }


def probed(records: Sequence[Record]) -> dict[str, Record]:
    """The last record of each candidate that was probed."""
    return {record.candidate_key: record for record in records if record.purpose == "probe"}


def ruled_out(candidate: Candidate, space: Space, records: Sequence[Record]) -> RuledOut | None:
    """The failure of another candidate that rules out `candidate`, if there is one.

    A failure during setup rules out the whole engine. If memory ran out, candidates of the same engine that need at
    least as much are ruled out: those with a larger micro-batch or less checkpointing. An engine that crashed or hung
    twice without any success counts as broken; so do some techniques. Losses that differ from the reference engine's do
    so with every micro-batch. A failure by fragmentation late in a trial rules out nothing: alone, it may fit.
    """
    if (broken := _broken(candidate.engine, space, records)) is not None:
        return broken
    for record in records:
        other = space.by_key.get(record.candidate_key)
        if other is None or other.engine != candidate.engine or record.outcome.kind == "fits" or other == candidate:
            continue
        if record.purpose == "probe":  # a failure with a few layers says nothing about the whole model
            continue
        if late_and_in_pieces(record, records):
            continue
        if failed_in_setup(record.outcome):
            return RuledOut(record, f"the engine already failed to start ({record.outcome.kind})")
        if record.outcome.moment == PARITY and same_steps(other, candidate):
            return RuledOut(record, record.outcome.sentence)
        of_memory = record.purpose == "measure" and record.outcome.kind in MEMORY_OUTCOMES
        if of_memory and _needs_as_much(candidate, other, record.outcome):
            return RuledOut(
                record, f"{other.variant}, which needs no more memory, already ended in {record.outcome.kind}"
            )
    return None


def _needs_as_much(candidate: Candidate, other: Candidate, outcome: Outcome) -> bool:
    """Whether `candidate` needs at least as much of what ran out for `other`, of the same engine, in `outcome`."""
    if candidate.micro_batch < other.micro_batch or candidate.checkpointed > other.checkpointed:
        return False
    if candidate.setup != other.setup and other.accumulation > 1:
        return False  # accumulation may be what needed more
    if candidate.offload_activations == other.offload_activations:
        return True
    # Without offloaded activations a candidate needs more memory on the GPU, and less on the host.
    return other.offload_activations and outcome.kind == "gpu_oom"


def same_steps(one: Candidate, other: Candidate) -> bool:
    """Whether the two differ only in the micro-batch."""
    return one.engine == other.engine and one.checkpointing == other.checkpointing


def late_and_in_pieces(record: Record, records: Sequence[Record]) -> bool:
    """Whether `record` ran out of GPU memory because of fragmentation, after other candidates of its trial.

    Those may have caused the fragmentation: a candidate that failed as the sixth of its trial fits as the second
    (measured: Llama-2-7B on four H200).
    """
    asked, free = record.outcome.bytes_asked, record.outcome.bytes_free
    in_pieces = record.outcome.kind == "gpu_oom" and asked is not None and free is not None and asked <= free
    first = next(other for other in records if other.trial == record.trial)
    return in_pieces and first.candidate_key != record.candidate_key


def _broken(engine: Engine, space: Space, records: Sequence[Record]) -> RuledOut | None:
    known = [
        record
        for record in records
        # A failed comparison of losses does not mean that the engine crashes.
        if record.purpose != "probe" and record.outcome.moment != PARITY and record.candidate_key in space.by_key
    ]
    engines = [(space.by_key[record.candidate_key].engine, record) for record in known]
    suspects = [("the engine", [record for other, record in engines if other == engine])]
    for technique in engine.techniques:
        if technique.breaks_as_one:
            with_it = [record for other, record in engines if technique in other.techniques]
            suspects.append((technique.title, with_it))
    for what, tried in suspects:
        failures = [record for record in tried if record.outcome.kind in ("crash", "hang")]
        if len(failures) >= _BROKEN_AFTER and not any(record.outcome.kind == "fits" for record in tried):
            return RuledOut(failures[-1], f"{what} failed {len(failures)} times ({failures[-1].outcome.kind})")
    return None


def failed_in_setup(outcome: Outcome) -> bool:
    """Whether the trial ended before any candidate was tried, so that its outcome applies to the whole engine."""
    return outcome.kind != "fits" and outcome.moment in _SETUP_MOMENTS


def disproved(records: Sequence[Record]) -> dict[str, Record]:
    """The failed proofs, by candidate key."""
    return {key: proof for key, proof in _proofs(records).items() if proof.outcome.kind != "fits"}


def ranking(records: Sequence[Record]) -> list[Record]:
    """The candidates that fit, fastest first, without those whose proof failed."""
    failed = disproved(records)
    fits = [
        record
        for record in measured(records).values()
        if record.outcome.kind == "fits" and record.candidate_key not in failed
    ]
    return sorted(fits, key=lambda record: -(record.tokens_per_second or 0.0))


def fastest(records: Sequence[Record]) -> Record | None:
    """The first of the `ranking`; None while nothing fits."""
    return next(iter(ranking(records)), None)


def warnings_of(record: Record, space: Space) -> tuple[str, ...]:
    """The warnings of `record`, and the cautions of its candidate's backend and techniques."""
    return (*cautions_of(record, space), *record.warnings)


def cautions_of(record: Record, space: Space) -> tuple[str, ...]:
    """What the backend and the techniques of its candidate change of the numerics, or risk."""
    engine = space.by_key[record.candidate_key].engine
    own = backend_of(engine.rung).caution(space.workload, engine.rung)
    return (*([own] if own else []), *engine.cautions)


def proven(records: Sequence[Record]) -> dict[str, Record]:
    """The successful proofs, by candidate key."""
    return {key: proof for key, proof in _proofs(records).items() if proof.outcome.kind == "fits"}


def proofs_before(records: Sequence[Record], proof: Record) -> list[Record]:
    """The other successful proofs of the candidate of `proof`."""
    own = (each for each in records if each.purpose == "proof" and each.candidate_key == proof.candidate_key)
    return [each for each in own if each.outcome.kind == "fits" and each is not proof]


def _proofs(records: Sequence[Record]) -> dict[str, Record]:
    """The last proof of each candidate, by key. It decides, even if an earlier one had another outcome."""
    return {record.candidate_key: record for record in records if record.purpose == "proof"}
