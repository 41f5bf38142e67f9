"""The ways of choosing a configuration that have to run on the hardware itself, each from its start to a real training.

Each takes a workload, an empty folder and how many real optimizer steps to make, and returns what it chose, the seconds
until then, how many attempts failed, and the measured row of the training that followed (`real`; None if none did).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import unmodified
from agreed import BUDGET, LONGEST
from autotuner import autotune
from hand_search import Row, searched
from side_by_side import Work, by_hand, faster, run, run_ranks, sizes, told_of, tune

_AUTOTUNER = 450.0
"""Of LONGEST for DeepSpeed's Autotuner. Chosen: it starts each of its 9 to 34 experiments anew, so it gets all but what
a short training needs; where that is not enough, the fastest experiment so far counts."""
_REAL = 150.0
"""Of LONGEST for timed real steps; fewer steps are made where so many take longer."""
_NOT_ONE = "batch_size=0"
"""In what Lightning says where not even one sequence fits."""
_SEARCHED = 64
"""Sequences of a GPU in a step of a search by hand. Chosen: nobody tries a micro-batch with all of a large batch."""

Way = Callable[[Work, Path, int], dict[str, Any]]


def of_ladder(*more: str) -> Way:
    """`ladder tune` with these words more, and `ladder verify` of the faster of its two answers for the real steps."""

    def way(work: Work, folder: Path, steps: int) -> dict[str, Any]:
        found = tune(work, folder, LONGEST, "--time-budget", f"{BUDGET:.0f}s", *more)
        if "deepspeed" not in found:
            return {"seconds": found["seconds"], "why": found["error"]}
        answer, file = faster(found)
        step_seconds = work.batch * work.seq_len / answer["tokens_per_second"]
        most = max(2, min(steps, int(_REAL / step_seconds)))
        words = ["verify", str(folder / file), "--steps", str(most), "--quiet", "--format", "json"]
        ended = run([sys.executable, "-m", "ladder", *words], longest=LONGEST - BUDGET)
        real, why = None, ended.why
        if "{" in ended.text:
            seen = json.loads(ended.text[ended.text.index("{") : ended.text.rindex("}") + 1])
            why = seen["sentence"]
            if seen["fits"]:
                real = {
                    "steps": seen["optimizer_steps"],
                    "tokens_per_second": round(seen["tokens_per_second"]["seen"], 1),
                    "peak_device_gib": seen["peak_device_gib"]["seen"],
                    "micro_batch": answer["micro_batch"],
                    "joules_per_token": seen["joules_per_token"],
                }
        return told_of(found, answer) | {"real": real, "why": why}

    return way


def hand(*methods: str) -> Way:
    """The fastest of these methods by hand, with and without checkpointing, micro-batches doubling until they fail."""

    def way(work: Work, folder: Path, steps: int) -> dict[str, Any]:
        few = replace(work, batch=min(work.batch, _SEARCHED * work.gpus))

        def attempt(search: tuple[str, bool], micro_batches: list[int], longest: float) -> tuple[list[Row], float]:
            began = time.monotonic()
            rows = by_hand(few, *search, longest, micro_batches=micro_batches, seconds=2.0)
            return rows, time.monotonic() - began

        found = searched(list(product(methods, (False, True))), sizes(few), attempt)
        if (best := found.best) is None:
            return found.told()
        answer = {key: best[key] for key in ("method", "checkpointing", "micro_batch", "tokens_per_second")}
        real = _real(work, best["method"], best["checkpointing"], best["micro_batch"], steps)
        return found.told() | {"answer": answer} | real

    return way


def _real(work: Work, method: str, checkpointing: bool, micro_batch: int, steps: int, **more: Any) -> dict[str, Any]:
    """The row of so many real steps with what was chosen, or why there is none."""
    left = LONGEST - (_AUTOTUNER if more else BUDGET)
    wanted = {"micro_batches": [micro_batch], "steps": steps, "seconds": min(_REAL, left / 2)}
    rows = by_hand(work, method, checkpointing, left, **wanted, **more)
    return {"real": rows[0]} if "tokens_per_second" in rows[0] else {"why": rows[-1].get("ended")}


def finder(method: str) -> Way:
    """A finder, which goes on to train; where it comes to nothing, once more with checkpointing, as people then do."""

    def way(work: Work, folder: Path, steps: int) -> dict[str, Any]:
        began, told = time.monotonic(), dict[str, Any]()
        for checkpointing in (False, True):
            before, failures = time.monotonic() - began, told.get("failures") or 0
            spec = work.spec(method, folder, steps=steps, seconds=_REAL) | {"checkpointing": checkpointing}
            rows, ended = run_ranks("finders.py", spec, work.gpus, LONGEST - before)
            found = [row for row in rows if "seconds" in row]  # a size may run out of memory after it was found
            real = [row for row in rows if "tokens_per_second" in row]
            told = {"seconds": before + (found[-1]["seconds"] if found else ended.seconds)}
            if ended.code != 0:
                told["why"] = ended.why
            if found:
                told["answer"] = {"micro_batch": found[-1]["micro_batch"], "checkpointing": checkpointing}
                told["failures"] = failures + found[-1]["failures"]
            if real:
                told["answer"]["trained_micro_batch"] = real[-1]["micro_batch"]  # the Trainer's may shrink once more
                return told | {"real": real[-1]}
            told["failures"] = told.get("failures", failures) + 1
            if ended.why != "out of memory" and _NOT_ONE not in ended.why:
                break
        return told

    return way


def of_deepspeed(*, fast: bool) -> Way:
    """DeepSpeed's Autotuner, and a real training with what it chose.

    Where no experiment ran, it is started once more with checkpointing, which it does not try itself.
    """

    def way(work: Work, folder: Path, steps: int) -> dict[str, Any]:
        told: dict[str, Any] = {"seconds": 0.0, "failures": 0, "experiments": 0, "failed": {}}
        for checkpointing in (False, True):
            left = _AUTOTUNER - told["seconds"]
            found = autotune(work, folder / str(checkpointing), fast, left, checkpointing=checkpointing)
            told |= {key: told[key] + found[key] for key in ("seconds", "failures", "experiments")}
            told |= {"failed": told["failed"] | found["failed"], "finished": found["finished"]}
            if found["samples_per_second"]:
                break
        if (chosen := found["chosen"]) is None:
            return told | {"why": "; ".join(found["last_words"])}
        micro_batch, whole = chosen["train_micro_batch_size_per_gpu"], replace(work, batch=chosen["train_batch_size"])
        answer = {"stage": chosen["zero_optimization"]["stage"], "micro_batch": micro_batch, "batch": whole.batch}
        answer |= {"checkpointing": checkpointing}
        return (
            told | {"answer": answer} | _real(whole, "deepspeed", checkpointing, micro_batch, steps, deepspeed=chosen)
        )

    return way


_NO_PROOF = ["offload", "checkpointing", "stage", "headroom", "proof", "why"]
WAYS: dict[str, tuple[Way, list[str]]] = {
    "ladder": (of_ladder(), []),
    "ladder unchecked": (of_ladder("--allow", "unchecked-gradients"), []),
    "ddp": (hand("ddp"), ["offload", "proof"]),
    "fsdp2": (hand("fsdp2", "fsdp2-kept"), ["proof"]),
    "trainer": (hand("trainer"), ["offload", "proof"]),
    "auto_find_batch_size": (finder("auto_find_batch_size"), [*_NO_PROOF, "accumulation"]),
    "find_executable_batch_size": (finder("find_executable_batch_size"), _NO_PROOF),
    "lightning": (finder("lightning"), [*_NO_PROOF, "accumulation", "several GPUs"]),
    "autotuner fast": (of_deepspeed(fast=True), ["offload", "checkpointing", "headroom", "proof"]),
    "autotuner full": (of_deepspeed(fast=False), ["offload", "checkpointing", "headroom", "proof"]),
}
"""By name: how it goes, and what it cannot say at all. By hand, a person says it, or nobody."""
WAYS_OF_A_SCRIPT: dict[str, tuple[Way, list[str]]] = {
    "ladder": (unmodified.ladder, []),
    "trainer": (unmodified.by_hand, ["offload", "proof"]),
    "auto_find_batch_size": (unmodified.finder, [*_NO_PROOF, "accumulation"]),
}
"""Those for a program that nobody changes; all others are code that would have to be put into it."""
