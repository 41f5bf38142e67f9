"""The texts of a report: the run, the answer and its figures, how to use it, and the environment."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ladder.backends.registry import backend_of
from ladder.candidates import Candidate
from ladder.emit.config import candidate_key_in
from ladder.emit.exporters.base import making_accelerate
from ladder.emit.files import OutputPaths
from ladder.events.outcome import MEMORY_OUTCOMES, Record
from ladder.events.promise import promised_range
from ladder.machine.machine_speed import mfu
from ladder.report.as_it_stands import compared, compared_without_deepspeed
from ladder.report.noise import busy_sentence
from ladder.report.run_data import ReportedRun
from ladder.search.bound import Bound, bound
from ladder.search.knobs import turned
from ladder.search.policy import faster_without_deepspeed
from ladder.search.remedies import remedies
from ladder.search.space import REFUSED, Space, measured, proofs_before, warnings_of
from ladder.techniques.keys import engine_in
from ladder.units import counted, format_bytes, in_words, parameters_in_words

_NONE = "–"
SIMULATED = "Simulated: a simulator answered each trial and each proof, and no GPU ran."


def introduction(run: ReportedRun) -> dict[str, str]:
    """Model, machine and workload, for a heading and the line below it."""
    space, workload = run.space, run.space.workload
    gpus = f"{space.world_size} × {space.gpu_name}" if space.gpu_name else f"{space.world_size} CPU ranks"
    num_tried, num_knobs = tried(space, run.records)
    progress = f"{num_tried} of {len(space.candidates)} candidates{and_knobs(num_knobs)}"
    progress += f" {'simulated' if run.simulated else 'measured'} in {counted(len(run.trial_seconds), 'trial')}"
    return {
        "model": workload.model.name,
        "where": f"{gpus}, {format_bytes(space.memory_limit)} each{', simulated' if run.simulated else ''}",
        "about": (
            f"{parameters_in_words(workload.model.num_parameters)}, {workload.task}, {workload.dtype}, "
            f"{workload.optimizer_in_words}, sequence length {workload.seq_len}, global batch "
            f"{workload.global_batch_size} sequences. {progress}. {run.folder}"
        ),
    }


def tried(space: Space, records: Sequence[Record]) -> tuple[int, int]:
    """How many of the space's candidates were tried, and how many settings of knobs, which are counted separately.

    Refused candidates have records too, but were not tried.
    """
    seen = [record for record in records if record.purpose == "measure" and record.outcome.moment != REFUSED]
    knobs = turned(space, seen).keys()
    return len({record.candidate_key for record in seen} - knobs), len(knobs)


def and_knobs(number: int) -> str:
    """Text for `number` settings of knobs, to follow a count; empty for 0."""
    return f" and {counted(number, 'setting')} of knobs" if number else ""


_PLACES = {"cpu": "in host memory", "nvme": "on NVMe"}
_CHECKPOINTING = {
    "off": "no checkpointing",
    "on": "checkpointing of every layer",
    "1/2": "checkpointing of every second layer",
    "cpu": "checkpoints in host memory",
}


def spelled_out(candidate: Candidate, space: Space) -> str:
    """A candidate as one would say it, such as `ZeRO-2, no checkpointing, micro-batch 4, accumulation 8, on 2 GPUs`."""
    rung, title = candidate.engine.rung, backend_of(candidate.engine.rung).title(candidate.engine.rung)
    held = {"the optimizer": rung.offload_optimizer, "parameters": rung.offload_param}
    for place, words in _PLACES.items():
        if there := [what for what, where in held.items() if where == place]:
            title += f" with {' and '.join(there)} {words}"
    parts = [title, *(technique.title for technique in candidate.engine.techniques)]
    parts += [f"{name} {value}" for name, value in candidate.engine.knobs]
    parts += [_CHECKPOINTING[candidate.checkpointing], f"micro-batch {candidate.micro_batch}"]
    parts += [f"accumulation {candidate.accumulation}"] if candidate.accumulation > 1 else []
    ranks = counted(space.world_size, "GPU" if space.device == "cuda" else "CPU rank")
    return f"{', '.join(parts)}, on {ranks}"


def answer_sentence(run: ReportedRun) -> str:
    """What it is in words, and whether it is proven; empty without one."""
    if run.best is None:
        return ""
    words = spelled_out(run.space.by_key[run.best.candidate_key], run.space)
    if run.simulated:
        return f"{words}. {SIMULATED}"
    if run.answer is None:
        return f"{words}. The fastest that fits so far; it is not proven yet."
    what = "with DeepSpeed" if _faster_plain(run.best, run.records, run.space) else "that fits"
    return (
        f"{words}. The fastest {what}, proven in fresh processes with an evaluation pass and the gathering of weights."
    )


def cautions(run: ReportedRun) -> tuple[str, ...]:
    """What to know of the figures, each without its full stop."""
    warnings = warnings_of(run.best, run.space) if run.best else ()
    busy = busy_sentence(run.records).removesuffix(".")
    return (busy, *warnings) if busy else warnings


def recipe_sentence(run: ReportedRun) -> str:
    """How the answer compares with the script as it stands, or with the documented recipe's first fit."""
    said = compared(run.space, run.records, run.best) if run.best is not None else ""
    plain = compared_without_deepspeed(run.space, run.records, run.best)
    return f"{said} Without DeepSpeed: {plain}" if plain else said or ""


def remedy_sentence(run: ReportedRun) -> str:
    """What would fit, if nothing fits because of memory; empty otherwise."""
    if run.best is not None or not any(record.outcome.kind in MEMORY_OUTCOMES for record in run.records):
        return ""
    on_cpu = run.space.device == "cpu"
    found = remedies(run.space, run.records, [rung.name for rung in run.unsupported])
    otherwise = "Allow more with --gpu-memory." if on_cpu else "Use more or larger GPUs."
    return found.sentence(on_cpu=on_cpu) or otherwise


def _faster_plain(best: Record | None, records: Sequence[Record], space: Space) -> Record | None:
    """The proof of a candidate without DeepSpeed that is faster than `best`, where that one has DeepSpeed."""
    plain = faster_without_deepspeed(records, space.tolerance)
    return plain if plain != best else None


def answer_figures(run: ReportedRun) -> list[tuple[str, str]]:
    """The answer's figures by name; empty without an answer."""
    record, space = run.best, run.space
    if record is None or record.measurement is None:
        return []
    seen, speed = record.measurement, record.tokens_per_second or 0.0
    candidate = space.by_key[record.candidate_key]
    first = measured(run.records).get(record.candidate_key)
    trial = first.tokens_per_second if first is not None else None
    promised = promised_range(candidate, record, first, proofs_before(run.records, record))
    used = mfu(space.workload, speed, space.world_size, space.gpu_name)
    figures = [
        (f"tokens/s, all {run.rank_word}s", f"{speed:,.0f}"),
        *([("tokens/s, in its trial", f"{trial:,.0f}")] if trial and run.answer else []),
        *([("tokens/s, in a training", in_words(promised))] if promised and run.answer else []),
        ("optimizer step", f"{seen.step_seconds(candidate.accumulation):.3g} s"),
        (f"memory per {run.rank_word}", f"{format_bytes(seen.peak_device)} of {format_bytes(space.memory_limit)}"),
        ("headroom", f"{1 - seen.peak_device / space.memory_limit:.1%}"),
        ("host memory, all ranks", format_bytes(seen.peak_host)),
        ("accumulation", counted(candidate.accumulation, "micro-step")),
    ]
    if used is not None:
        figures.append(("model FLOP/s utilisation", f"{used:.0%}"))
    if (plain := _faster_plain(record, run.records, space)) is not None:
        times = f"{(plain.tokens_per_second or 0.0) / speed:.2f} times as fast: {plain.tokens_per_second:,.0f} tokens/s"
        figures.append(("without DeepSpeed", f"{times} with {plain.candidate_key}, see best_plain.json"))
    if (limit := bound(space, run.records, record)) is not None:
        figures.append(("share of the physical limit", f"{limit.share:.0%} of {limit.tokens_per_second:,.0f} tokens/s"))
        figures.append(("where a step goes", where_a_step_goes(limit)))
    if (joules := record.joules_per_token) is not None:
        figures.append(("energy", f"{1000 * joules:.2g} J for 1,000 tokens"))
    return figures


def where_a_step_goes(limit: Bound) -> str:
    """Shares of a step, the largest first, in words short enough for a table."""
    parts = sorted(limit.parts, key=lambda part: -part.seconds)
    return ", ".join(f"{part.seconds / limit.step_seconds:.0%} {part.short}" for part in parts)


def usage(config: Mapping[str, Any], path: Path) -> str:
    """The commands that use the answer at `path`, which work in any folder."""
    section, answer = config["ladder"], shlex.quote(str(path))
    exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in section["environment"].items())
    simulated = section["proof"].get("simulated")
    verifying = "" if simulated else f"\n# does it still fit, after an upgrade?\nladder verify {answer}"
    techniques = engine_in(candidate_key_in(section)).techniques
    if any(technique.only_the_trainer(section["world_size"]) for technique in techniques):
        launch = shlex.quote(str(OutputPaths.beside(path).launch))
        asked = "# a Hugging Face Trainer script; the launch script says which arguments and data it needs"
        return f"{asked}\nbash {launch} train.py{verifying}"
    calls = "".join(f"; it first calls {call}" for technique in techniques if (call := technique.first_call()))
    accelerate = OutputPaths.beside(path).accelerate
    making = "" if accelerate.exists() else f"{making_accelerate(path)}\n"  # the answer may have been moved without it
    return f"""\
# the environment {"that trials would have" if simulated else "it was measured in"}
{exports}
# a Hugging Face Trainer script; its arguments must agree: `ladder export {answer} --for trainer`
torchrun --nproc_per_node {section["world_size"]} train.py --deepspeed {answer}
# an accelerate script{calls}
{making}accelerate launch --config_file {shlex.quote(str(accelerate))} train.py{verifying}"""


def environment(run: ReportedRun) -> list[tuple[str, str]]:
    """Machine, limits and versions, by name."""
    space, versions = run.space, dict(run.facts.get("versions", {}))
    facts = [
        ("device", f"{space.world_size} × {space.gpu_name}" if space.gpu_name else f"{space.world_size} CPU ranks"),
        (f"memory limit per {run.rank_word}", format_bytes(space.memory_limit)),
        ("host memory for all ranks", format_bytes(space.host_memory)),
        ("CPU cores", str(space.num_cores)),
        ("tolerance", f"{space.tolerance:.1%}"),
    ]
    facts += [(name, value) for name, value in run.about.items() if name != "command"]
    facts += [(f"{name}", str(version)) for name, version in versions.items()]
    facts += [(f"unsupported: {rung.name}", reason) for rung, reason in run.unsupported.items()]
    return facts


def comparison(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """A table of several runs, with one row per fact and one column per run."""
    by_run = [dict(_facts(run)) for run in runs]
    names = list(dict.fromkeys(name for facts in by_run for name in facts))
    return [{"name": name, "values": [facts.get(name, _NONE) for facts in by_run]} for name in names]


def _facts(run: ReportedRun) -> list[tuple[str, str]]:
    words, workload = introduction(run), run.space.workload
    facts = [
        ("model", words["model"]),
        ("machine", words["where"]),
        ("sequence length", str(workload.seq_len)),
        ("global batch", str(workload.global_batch_size)),
        ("answer", run.best.candidate_key if run.best else "nothing fits"),
        ("proven", "no, simulated" if run.simulated else "yes" if run.answer else "no"),
        *answer_figures(run),
        ("trials", str(len(run.trial_seconds))),
        ("tune", f"{sum(sum(seconds.values()) for seconds in run.trial_seconds.values()):.0f} s"),
    ]
    return facts + [(name, str(version)) for name, version in run.facts.get("versions", {}).items()]
