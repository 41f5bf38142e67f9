"""An unmodified program beside ladder: TRL's own SFT, on texts of uneven lengths, with all weights or with LoRA.

Three ways fit a program that nobody changes: `ladder tune` of it, its own options by hand, and the Trainer's finder,
which is one of its options. Each attempt is a process of its own, as people start it, and takes until its last step:
the program then saves its model, which nobody would wait for. A training's speed is that of the tokens that it trains
on, without padding, by its own logging.

Model and data are made once, in the folder for temporary files.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agreed import BUDGET, LONGEST, MOST, PROVEN, SLOWER
from hand_search import Row, searched
from script_inputs import Peak, made_model, make_data
from side_by_side import BY_HAND, HERE, TIME_OVER, Ended, Work, faster, first_gpus, run, sizes, told_of, tune

from ladder.machine.gpus import visible_gpus
from ladder.workload.lora import lora_from_text

_FEW = 8
"""Optimizer steps of an attempt by hand. Chosen: the first ones are slower, and nobody waits for more."""
_LOGGED = re.compile(r"^([\d.]+) .*'loss': .*'num_tokens': '?([\d.e+]+)'?", re.MULTILINE)
_SIZE = re.compile(r"Total train batch size \(.*\) = ([\d,]+)")
_NO_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True)
class Training:
    """How a start of the program ended, and what its logging said."""

    began: float
    ended: Ended
    peak_gib: float
    logged: list[tuple[float, float]]
    """For each optimizer step: the second at which it was logged, and the tokens until then."""

    @property
    def tokens_per_second(self) -> float | None:
        """In the last steps; None if it failed."""
        last = self.logged[-MOST - 1 :]
        if self.ended.code != 0 or len(last) < 2:
            return None
        (began, first), (over, tokens) = last[0], last[-1]
        return round((tokens - first) / (over - began), 1)

    @property
    def seconds(self) -> float:
        """From the start to the last step, or to the end where there was none."""
        return self.logged[-1][0] - self.began if self.logged else self.ended.seconds

    @property
    def why(self) -> str | None:
        """Why there is no speed."""
        if self.tokens_per_second is not None:
            return None
        text = self.ended.text
        return "out of memory" if any(each in text for each in _NO_MEMORY) else self.ended.why

    def real(self, micro_batch: int) -> dict[str, Any] | None:
        """The columns of a training for real."""
        if self.tokens_per_second is None:
            return None
        row = {"steps": len(self.logged), "tokens_per_second": self.tokens_per_second, "micro_batch": micro_batch}
        return row | {"peak_device_gib": self.peak_gib}


def ladder(work: Work, folder: Path, steps: int) -> dict[str, Any]:
    """`ladder tune` of the program, and `ladder run` of the faster of its two answers."""
    program = program_of(work)
    found = tune(work, folder, LONGEST, "--time-budget", f"{BUDGET:.0f}s", program=program)
    if "deepspeed" not in found:
        return {"seconds": found["seconds"], "why": found["error"]}
    answer, file = faster(found)
    start = [sys.executable, "-m", "ladder", "run", str(folder / file), "--", *program]
    training = trained(work, start, [], steps, LONGEST - BUDGET, folder)
    return told_of(found, answer) | {"real": training.real(answer["micro_batch"]), "why": training.why}


def by_hand(work: Work, folder: Path, steps: int) -> dict[str, Any]:
    """Its options for the micro-batch and for checkpointing, sizes doubling until one fails or is slower."""
    start = starts(work)

    def attempt(checkpointing: bool, micro_batches: list[int], longest: float) -> tuple[list[Row], float]:
        rows, spent, best = list[Row](), 0.0, 0.0
        for micro_batch in micro_batches:
            more = options(work, micro_batch, checkpointing)
            training = trained(work, start, more, _FEW, longest - spent, folder)
            spent += training.seconds
            if training.tokens_per_second is None:
                return [*rows, {"ended": str(training.why)}], spent
            speed = training.tokens_per_second
            rows.append({"micro_batch": micro_batch, "checkpointing": checkpointing, "tokens_per_second": speed})
            best = max(best, speed)
            if speed < SLOWER * best:
                break
            if spent >= longest and micro_batch < micro_batches[-1]:
                return [*rows, {"ended": f"{TIME_OVER} after {spent:.0f} s"}], spent
        return rows, spent

    found = searched([False, True], sizes(work), attempt)
    if (best := found.best) is None:
        return found.told()
    more = options(work, best["micro_batch"], best["checkpointing"])
    training = trained(work, start, more, steps, LONGEST - BUDGET, folder)
    return found.told() | {"answer": best, "real": training.real(best["micro_batch"]), "why": training.why}


def finder(work: Work, folder: Path, steps: int) -> dict[str, Any]:
    """`auto_find_batch_size`, once to find and once to train, as it leaves the accumulation as it is.

    Where it comes to nothing, once more with checkpointing.
    """
    start, finds, told = starts(work), ["--auto_find_batch_size", "True"], {"seconds": 0.0, "failures": 0}
    for checkpointing in (False, True):
        whole = [*options(work, work.batch // work.gpus, checkpointing), *finds, "--log_level", "info"]
        training = trained(work, start, whole, PROVEN, BUDGET / 2, folder)
        tried = tried_sizes(training.ended.text, work.gpus)
        failures = told["failures"] + max(0, len(tried) - bool(training.tokens_per_second))
        told = {"seconds": told["seconds"] + training.seconds, "failures": failures}
        if training.tokens_per_second is None:
            continue
        again = [*options(work, tried[-1], checkpointing), *finds]
        training = trained(work, start, again, steps, (LONGEST - BUDGET) / 2, folder)
        if training.tokens_per_second is not None:
            answer = {"micro_batch": tried[-1], "checkpointing": checkpointing}
            return told | {"answer": answer, "real": training.real(tried[-1])}
    return told | {"why": training.why}


def program_of(work: Work) -> list[str]:
    """The program with what the workload says; how it is divided is not among that."""
    folder = Path(tempfile.gettempdir()) / "ladder-unmodified"
    make_data(folder)
    model = made_model(folder, work.model, None)
    words = ["-m", "trl.scripts.sft", "--model_name_or_path", str(model), "--dataset_name", str(folder / "text")]
    words += ["--max_length", str(work.seq_len), "--output_dir", "never-written", "--save_strategy", "no"]
    words += ["--learning_rate", "1e-6", "--logging_steps", "1", "--report_to", "none", "--disable_tqdm", "True"]
    if work.lora:
        lora = lora_from_text(work.lora)
        words += ["--use_peft", "--lora_r", str(lora.rank), "--lora_alpha", str(lora.alpha)]
    if visible_gpus():
        return [*words, "--use_liger_kernel", "True"]
    return [*words, "--use_cpu", "--bf16", "False"]


def starts(work: Work) -> list[str]:
    """The program's start, alone or by torchrun."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(work.gpus)]
    return [sys.executable, *(launch if work.gpus > 1 else []), *program_of(work)]


def options(work: Work, micro_batch: int, checkpointing: bool) -> list[str]:
    """Its own, for how a step is divided; the batch is the nearest to the one wanted."""
    accumulation = max(1, round(work.batch / (micro_batch * work.gpus)))
    words = ["--per_device_train_batch_size", str(micro_batch), "--gradient_accumulation_steps", str(accumulation)]
    return [*words, "--gradient_checkpointing", str(checkpointing)]


def trained(
    work: Work, start: Sequence[str], more: Sequence[str], steps: int, longest: float, folder: Path
) -> Training:
    """A start of the program with these options for so many optimizer steps."""
    watch, began = Peak(), time.monotonic()
    words = [sys.executable, str(HERE / "stamped.py"), *start, *more, "--max_steps", str(steps)]
    ended = run(words, longest=longest, environment=BY_HAND | first_gpus(work.gpus), folder=folder)
    return Training(began, ended, round(watch.stop(), 3), logged_steps(ended.text))


def logged_steps(text: str) -> list[tuple[float, float]]:
    """The second of each step's line of logging, and the tokens until then."""
    return [(float(second), float(tokens)) for second, tokens in _LOGGED.findall(text)]


def tried_sizes(text: str, gpus: int) -> list[int]:
    """Micro-batches of a GPU with which a training without accumulation began, one after the other."""
    return [int(size.replace(",", "")) // gpus for size in _SIZE.findall(text)]
