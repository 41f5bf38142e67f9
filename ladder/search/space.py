"""The space of one tune, and what the history already says about each candidate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ladder.backends.base import Device
from ladder.candidates import Candidate, Engine, Problem, candidates_of
from ladder.candidates.checkpointing import WayOfCheckpointing
from ladder.events.outcome import MEMORY_OUTCOMES, Outcome, Record
from ladder.search.memory import expected_peak
from ladder.techniques.keys import candidate_of
from ladder.techniques.registry import WAYS_OF_CHECKPOINTING
from ladder.workload.shapes import with_layers
from ladder.workload.workload import Workload

_BROKEN_AFTER = 2
"""Crashes or hangs before an engine or a technique of which nothing fits is taken for broken. Chosen: a single one may
be chance, or one candidate's fault."""
PARITY = "parity"
"""The moment of a failure that is none of memory: the losses were not the plain rung's."""
REFUSED = "refused"
"""The moment of one that never came to a trial: the host has no memory for it."""
_SETUP_MOMENTS = frozenset({"process_group", "model", "engine"})


@dataclass(frozen=True, kw_only=True)
class Space(Problem):
    """All candidates of a tune. Facts only; everything else is derived."""

    engines: tuple[Engine, ...]
    """The engines that this machine supports, in the documented order."""
    micro_batches: tuple[int, ...]
    """Ascending divisors of the sequences a rank has per step."""
    tolerance: float = 0.02
    """The search is over when no candidate left is believed to be faster than the best by more than this fraction."""
    probe_layers: int = 0
    """Layers of the model that an engine may be probed with before a full trial is paid for; 0: none."""
    checkpointing: tuple[str, ...] = ()
    """Names of the ways of checkpointing that are tried beside all layers and none."""
    audit: float = 0.0
    """The share of the candidates ruled out unmeasured that is measured anyway, to know how often that was wrong."""

    @property
    def sequences_per_rank(self) -> int:
        return self.workload.global_batch_size // self.world_size

    def named(self, key: str) -> Candidate:
        """The candidate of this key, of the space or not. ValueError for a text that is no candidate's key."""
        return candidate_of(key, self.workload.global_batch_size, self.world_size)

    def on_host(self, host: int, held: int) -> int:
        """Host memory of all ranks: `host`; on the CPU, what each has `held` in its device's place.

        The processes of ranks on the CPU are not counted.
        """
        return host if self.device == "cuda" else held * self.world_size

    @property
    def ways_of_checkpointing(self) -> list[WayOfCheckpointing]:
        """Those of `checkpointing` that candidates of this workload can have."""
        return [way for name in self.checkpointing if (way := WAYS_OF_CHECKPOINTING[name]).suits(self)]

    @cached_property
    def shallow(self) -> Workload:
        """What a probe trains: the same with `probe_layers` layers."""
        return replace(self.workload, model=with_layers(self.workload.model, self.probe_layers))

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        return tuple(candidate for engine in self.engines for candidate in self.of_engine(engine))

    @cached_property
    def by_key(self) -> dict[str, Candidate]:
        """The space's candidates; asked for by key, also one with other knobs. KeyError for what is no key."""
        return _Candidates(self)

    @cached_property
    def _sorted(self) -> dict[Engine, tuple[Candidate, ...]]:
        return {engine: tuple(self._in_order(engine)) for engine in self.engines}

    def of_engine(self, engine: Engine) -> tuple[Candidate, ...]:
        """The engine's candidates in ascending predicted memory, so that the one that runs out is the last."""
        return self._sorted[engine]

    def _in_order(self, engine: Engine) -> list[Candidate]:
        sharing = engine.ranks_of_a_sequence(self.world_size)
        # Ranks that share a sequence take one at a time: where there is room for more, each can have its own.
        sizes = (1,) if engine.shares_sequences else self.micro_batches
        usual = list(candidates_of(engine, self.sequences_per_rank * sharing, sizes))
        ways = self.ways_of_checkpointing
        others = [other for way in ways for other in way.candidates(self, usual, self.predicted_peak)]
        return sorted([*usual, *others], key=lambda candidate: (self.predicted_peak(candidate), candidate.micro_batch))

    def predicted_peak(self, candidate: Candidate) -> int:
        """Bytes of a rank, before any trial."""
        device: Device = "cuda" if self.device == "cuda" else "cpu"
        return expected_peak(self.workload, candidate, world_size=self.world_size, device=device)


class _Candidates(dict[str, Candidate]):
    """A space's candidates by key. The knobs that are tried later are no part of the space, but have keys as well."""

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
    """Why a candidate need not be tried: a trial already showed it."""

    record: Record
    reason: str


def measured(records: Sequence[Record]) -> dict[str, Record]:
    """The last record of each candidate that a measuring trial tried."""
    return {record.candidate_key: record for record in records if record.purpose == "measure"}


def probed(records: Sequence[Record]) -> dict[str, Record]:
    """The last record of each candidate that a probe tried."""
    return {record.candidate_key: record for record in records if record.purpose == "probe"}


def ruled_out(candidate: Candidate, space: Space, records: Sequence[Record]) -> RuledOut | None:
    """The failure that speaks for `candidate` too, if there is one.

    A failure while the engine was being set up speaks for the whole engine. One that came with a candidate speaks for
    those of the same engine that need at least as much: a larger micro-batch, or the same with less checkpointing. An
    engine that crashed or hung twice, and of which nothing fits, is taken for broken; so are some techniques. Losses
    that are not the plain rung's are so at every micro-batch. What ran out late and in pieces speaks for nobody: alone,
    even that candidate may fit.
    """
    if (broken := _broken(candidate.engine, space, records)) is not None:
        return broken
    for record in records:
        other = space.by_key.get(record.candidate_key)
        if other is None or other.engine != candidate.engine or record.outcome.kind == "fits" or other == candidate:
            continue
        if record.purpose == "probe":  # what goes wrong with a few layers need not with all of them
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
    """Whether `candidate` needs at least what `other`, of the same engine, had too little of in `outcome`."""
    if candidate.micro_batch < other.micro_batch or candidate.checkpointed > other.checkpointed:
        return False
    if candidate.setup != other.setup and other.accumulation > 1:
        return False  # it is accumulating that took more
    if candidate.offload_activations == other.offload_activations:
        return True
    # Of the two, the one that keeps its activations on the GPU needs more there, and less on the host.
    return other.offload_activations and outcome.kind == "gpu_oom"


def same_steps(one: Candidate, other: Candidate) -> bool:
    """Whether the two train alike but for the micro-batch."""
    return one.engine == other.engine and one.checkpointing == other.checkpointing


def late_and_in_pieces(record: Record, records: Sequence[Record]) -> bool:
    """Whether `record` ran out of GPU memory that was there, but not in one piece, after others in its trial.

    What they left of the allocator's memory is to blame as much as the candidate: one that came sixth in its trial
    failed so, and fits where it comes second (measured: Llama-2-7B on four H200).
    """
    asked, free = record.outcome.bytes_asked, record.outcome.bytes_free
    in_pieces = record.outcome.kind == "gpu_oom" and asked is not None and free is not None and asked <= free
    first = next(other for other in records if other.trial == record.trial)
    return in_pieces and first.candidate_key != record.candidate_key


def _broken(engine: Engine, space: Space, records: Sequence[Record]) -> RuledOut | None:
    known = [
        record
        for record in records
        # Losses that are others speak of the steps that were compared, and not of the engine.
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
    """The trial ended before any candidate was tried, so its outcome is the whole engine's."""
    return outcome.kind != "fits" and outcome.moment in _SETUP_MOMENTS


def disproved(records: Sequence[Record]) -> dict[str, Record]:
    """By candidate: the proof that failed."""
    return {key: proof for key, proof in _proofs(records).items() if proof.outcome.kind != "fits"}


def ranking(records: Sequence[Record]) -> list[Record]:
    """The candidates that fit, fastest first, less those whose proof of fit failed."""
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
    """What the figures of `record` do not hold for, and how its candidate trains otherwise than usual."""
    return (*space.by_key[record.candidate_key].engine.cautions, *record.warnings)


def proven(records: Sequence[Record]) -> dict[str, Record]:
    """The candidates that passed their proof of fit, by key."""
    return {key: proof for key, proof in _proofs(records).items() if proof.outcome.kind == "fits"}


def _proofs(records: Sequence[Record]) -> dict[str, Record]:
    """The last proof of each candidate decides: what has failed since is no answer, whatever was once proven."""
    return {record.candidate_key: record for record in records if record.purpose == "proof"}
