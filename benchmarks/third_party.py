"""What ladder predicts before any trial, against memory, speed and outcomes that others published.

    python benchmarks/third_party.py ROWS.json [--out FILE.json]

ROWS.json is a list of published runs, each with the candidate that says the same in ladder's words, or with what they
cannot say. A run is predicted as by `ladder plan`, from data sheets; nothing is fitted. Memory is allocated or
reserved, as the row says, without what lies outside PyTorch. An outcome is right if ladder gave what came at
least even chances. Where a row does not say how often it accumulates, it is once. Kernels other than transformers'
make a group of their own. Errors are predicted over published; FILE.json gets a record of each row, or why it was left
out.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ladder.candidates import Candidate, Problem
from ladder.errors import UsageError
from ladder.launch.counting import counting
from ladder.machine.described import Machine
from ladder.options.tune import WorkloadOptions
from ladder.search.belief import LIKELY, Outlook, believe
from ladder.simulation.paper_machine import read_machine
from ladder.step.ledger import START
from ladder.techniques.keys import candidate_of
from ladder.techniques.registry import TECHNIQUES
from ladder.tuning.problem import problem_of, space_on
from ladder.tuning.workload_and_machine import workload_of
from ladder.units import gib, parse_bytes
from ladder.workload.lora import ALL_LINEAR, Lora
from ladder.workload.shapes import shape_from_config
from ladder.workload.source import bundled_models, hub_ids, resolve_model
from ladder.workload.trained import linear_names
from ladder.workload.workload import ModelShape, Workload

_MODELS = Path(__file__).resolve().parent / "models"
_FILES = {"NousResearch/Llama-2-70b-hf": "llama-2-70b.json"}
"""Models whose shape other benchmarks have already; those of this one are in third-party.json."""
_MACHINES = {
    "A100 40GB": ("a100-40", None),
    "A100 80GB": ("a100-80", None),
    "H100 80GB": ("h100-80", None),
    "H100 96GB HBM2E 500W": ("h100-80", "95GiB"),
    "H200": ("h200", None),
    "NVIDIA L40S": ("l40s", None),
    "V100 32GB": ("v100-32", None),
}
"""By a row's words for its GPU, in capitals: a machine, and the GPU's memory where it differs."""
_SIZES = re.compile(
    r"learned positions, tied embeddings: d_model=(?P<n_embd>\d+), heads=(?P<n_head>\d+), layers=(?P<n_layer>\d+), "
    r"ffn=4d, vocab=(?P<vocab_size>\d+)"
)
_LORA = re.compile(r"LoRA r=(?P<rank>\d+)\S* on (?P<targets>[^(]+)")
_TARGETS = {"all linear": (ALL_LINEAR,), "attention": ("q_proj", "v_proj")}
"""Targets in words; the second is what the program means by it whose rows have it."""
_FIGURES = ("memory_gib", "tokens_per_second")

Row = Mapping[str, Any]
Record = Mapping[str, Any]


class LeftOutError(Exception):
    """Why a row is not predicted."""


def record_of(index: int, row: Row) -> dict[str, Any]:
    """What is predicted of `row`, and what was published; or why it is left out."""
    kernels = row["liger_or_fused_ce"]
    record: dict[str, Any] = {"index": index, "group": f"{row['group']}, {kernels}" if kernels else row["group"]}
    try:
        outlook = outlook_of(row)
    except LeftOutError as reason:
        return record | {"left_out": str(reason)}
    workload, memory = outlook.workload, outlook.memory
    allocated = max(need for name, need in memory.moments.items() if name != START)
    reserved = memory.peak - memory.parts.outside_torch
    predicted = {
        "memory_gib": gib(reserved if "reserved" in (row["memory_kind"] or "") else allocated),
        "tokens_per_second": round(outlook.tokens_per_second, 1),
        "fits": outlook.fits >= LIKELY,
    }
    has_fitted = row["outcome"] == "fits"
    published = {
        "memory_gib": row["peak_memory_gib"] if has_fitted else None,
        "tokens_per_second": row["tokens_per_second"] if "time" in row["quality"] else None,
        "fits": has_fitted,
    }
    ratios = {name: round(predicted[name] / published[name], 4) for name in _FIGURES if published[name]}
    kind = "full" if workload.lora is None else "QLoRA" if workload.load_in else "LoRA"
    told = {"predicted": predicted, "published": published, "ratio": ratios}
    return record | {"kind": kind, "candidate": outlook.candidate.key, **told}


def outlook_of(row: Row) -> Outlook:
    """Everything that ladder predicts of `row`. LeftOutError for what it has no words or no figures for."""
    if not row["ladder_candidate"] or row["not_said_by_ladder"]:
        raise LeftOutError(row["not_said_by_ladder"] or "no candidate of ladder's says the same")
    if "Transformer Engine" in row["notes"]:
        raise LeftOutError("FP8 by Transformer Engine")
    lora, shape, machine = adapters_of(row), shape_of(row), machine_of(row)
    batch = row["micro_batch"] * (row["grad_accum"] or 1) * row["num_gpus"]
    problem = problem_of(_workload(row, shape, lora, machine, batch), machine)
    candidate = _with_more(candidate_of(row["ladder_candidate"], batch, machine.world_size), row, problem)
    rung = candidate.engine.rung
    space, unsupported = space_on(problem.workload, machine, [rung], [candidate.micro_batch])
    if rung in unsupported:
        raise LeftOutError(unsupported[rung])
    return believe(space, ()).outlook(candidate)


def adapters_of(row: Row) -> Lora | None:
    """The adapters that the row tells, with targets by whole names, by letters or in words."""
    if row["adapter"] is None:
        return None
    said = _LORA.match(row["adapter"])
    if said is None:
        raise LeftOutError("rank and targets of the adapters not stated")
    words = [word for word in re.findall(r"\w+", said["targets"]) if word != "DoRA"]
    targets = tuple(f"{word}_proj" if len(word) == 1 else word for word in words)
    named = _TARGETS.get(said["targets"].strip(), targets)
    return Lora(rank=int(said["rank"]), targets=named, dora="DoRA" in said["targets"])


def shape_of(row: Row) -> ModelShape:
    """The shape that is bundled, that lies beside the benchmarks, or whose sizes the row's notes tell."""
    model, count = row["hf_id"], counting()
    if bundled := next((name for name in bundled_models() if model in hub_ids(name)), None):
        return resolve_model(bundled, count=count)
    if model in _FILES:
        return resolve_model(str(_MODELS / _FILES[model]), count=count)
    known = json.loads((_MODELS / "third-party.json").read_text())
    if model in known:
        config = known[model]["config"]
    elif sizes := _SIZES.search(row["notes"]):
        config = _decoder({name: int(size) for name, size in sizes.groupdict().items()}, row["seq_len"])
    else:
        raise LeftOutError("shape unknown")
    return shape_from_config(config, name=row["model"], source="file", count=count)


def _decoder(sizes: Mapping[str, int], positions: int) -> dict[str, Any]:
    """GPT-2 without dropout, whose blocks and positions have as many parameters as those rows say of theirs."""
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return {"model_type": "gpt2", **sizes, "n_positions": positions, "activation_function": "gelu", **dropout}


def machine_of(row: Row) -> Machine:
    """The GPUs in as many nodes as they need."""
    name, memory = _MACHINES.get(row["gpu"].upper().replace("_", " "), (None, None))
    if name is None:
        raise LeftOutError("GPU unknown")
    paper = read_machine(name)
    if memory is not None:
        paper = paper.model_copy(update={"gpu_memory": parse_bytes(memory)})
    return paper.machine(row["num_gpus"])


def _workload(row: Row, shape: ModelShape, lora: Lora | None, machine: Machine, batch: int) -> Workload:
    """What is trained. peft passes over targets that a model lacks, where it has others."""
    if lora is not None:
        names = {ALL_LINEAR, *linear_names(shape.modules)}
        lora = replace(lora, targets=tuple(target for target in lora.targets if target in names))
    try:
        return workload_of(
            shape,
            WorkloadOptions(
                seq_len=row["seq_len"],
                global_batch_size=batch,
                dtype="fp16" if row["precision"] == "fp16" else "bf16",
                optimizer=row["optimizer"],
                lora=lora,
                load_in="4bit" if row["quantised"] else None,
            ),
            machine,
            lambda _: None,
        )
    except UsageError as error:
        raise LeftOutError(str(error)) from None


def _with_more(candidate: Candidate, row: Row, problem: Problem) -> Candidate:
    """`candidate` with the techniques that the row says elsewhere."""
    engine = candidate.engine
    for name, is_said in (("compile", row["compile"]), ("fp8", "float8" in row["precision"])):
        if is_said:
            if not TECHNIQUES[name].gets_into(engine.rung, problem):
                raise LeftOutError(f"{TECHNIQUES[name].title} on {engine.rung.name}")
            engine = engine.having(TECHNIQUES[name])
    return replace(candidate, engine=engine)


def groups_of(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of each group and kind of training, then those of each kind, and all."""
    found: dict[str, list[Record]] = {}
    for record in records:
        for name in (f"{record['group']}: {record['kind']}", f"all: {record['kind']}", "all"):
            found.setdefault(name, []).append(record)
    return dict(sorted(found.items(), key=lambda item: (item[0].startswith("all"), item[0] == "all", item[0])))


def errors(records: Sequence[Record], figure: str) -> Iterator[str]:
    """A line for each group: the median of a figure's ratios, and their 10th and 90th percentile."""
    for name, own in groups_of([record for record in records if figure in record["ratio"]]).items():
        ratios = [record["ratio"][figure] for record in own]
        low, *_, high = statistics.quantiles(ratios, n=10, method="inclusive") if len(ratios) > 1 else ratios * 2
        yield f"{name:46} {len(ratios):4d}  {statistics.median(ratios):6.2f} {low:6.2f} {high:6.2f}"


def outcomes(records: Sequence[Record]) -> Iterator[str]:
    """A line for each group: how many outcomes were right, and which way the others were wrong."""
    for name, own in groups_of(records).items():
        pairs = [(record["predicted"]["fits"], record["published"]["fits"]) for record in own]
        right = sum(said == came for said, came in pairs)
        yield f"{name:46} {len(own):4d}  {right:5d}  {pairs.count((True, False)):15d}  {pairs.count((False, True)):14d}"


def last_line(records: Sequence[Record], rows: int) -> str:
    words = [f"rows={rows} predicted={len(records)}"]
    for name, figure in zip(("memory", "speed"), _FIGURES, strict=True):
        ratios = [record["ratio"][figure] for record in records if figure in record["ratio"]]
        words.append(f"{name}={len(ratios)} {name}_median={statistics.median(ratios):.3f}" if ratios else f"{name}=0")
    right = sum(record["predicted"]["fits"] == record["published"]["fits"] for record in records)
    return " ".join([*words, f"outcomes={len(records)} outcomes_right={right}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = json.loads(options.rows.read_text())
    every = [record_of(index, row) for index, row in enumerate(rows)]
    if options.out:
        options.out.write_text(json.dumps(every, indent=1) + "\n")
    records = [record for record in every if "left_out" not in record]
    for title, figure in (("memory", "memory_gib"), ("tokens/s", "tokens_per_second")):
        print(f"{title + ', predicted over published':46} rows  median   10 %   90 %")
        print(*errors(records, figure), "", sep="\n")
    print(f"{'outcome':46} rows  right  ran out instead  fitted instead")
    print(*outcomes(records), "", sep="\n")
    reasons = Counter(record["left_out"] for record in every if "left_out" in record)
    print(f"left out: {reasons.total()}")
    print(*(f"{number:4d}  {reason}" for reason, number in reasons.most_common()), "", sep="\n")
    print(last_line(records, len(rows)))


if __name__ == "__main__":
    main()
