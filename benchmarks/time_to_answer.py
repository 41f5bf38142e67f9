"""How long a tune takes from Enter to its first trial and to its answer: this checkout, beside another one.

    python benchmarks/time_to_answer.py [--old FOLDER] [--repeats 1] [--warm] [--keep FOLDER] [-- TUNE ARGUMENTS]

    python benchmarks/time_to_answer.py --old ../before -- llama-3.2-1b --gpus 2

Without arguments for the tune, it is the smoke tune on two CPU ranks. Each tune runs in an empty folder. Operators and
Triton's kernels are compiled into empty folders too, and the cache of `ladder` is empty, unless `--warm` is given: then
a first tune fills all, which has a row of its own. `--measure` also runs `ladder doctor --measure` before (new checkout
only), as on a machine that is known. `--keep` keeps the folder of the new checkout's last run. Old and new alternate,
so that both see the same state of the host.

A trial begins when rank 0's process reports its first phase. The table shows where the seconds of a command go:

- import: until the run folder exists: Python, imports, model, machine, checks;
- server: until the first rank reports: operators that it waits for, the trial server's imports, the fork;
- trials: from the first to the last event of a rank, which `losses` and `proof` are parts of;
- rest: reports and files, until the command has ended.

The last line has medians of the new checkout; `speedup` is the old one's answer_seconds over the new one's, 1 without
`--old`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).resolve().parents[1]
_SMOKE = ("tiny-llama", "--gpus", "0")
_LADDER = "import sys; from ladder.cli.main import main; sys.exit(main())"
_MOST_SECONDS = 1800.0


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Seconds of one command, from Enter."""

    name: str
    folder: float
    """Until its run folder exists."""
    first_trial: float
    last_event: float
    answer: float
    trials: int
    """All that ran: comparisons of losses, probes and the proof among them."""
    losses: float
    """Seconds of the comparisons of losses."""
    proof: float

    @property
    def parts(self) -> tuple[float, ...]:
        """import, server, trials, losses, proof, rest."""
        server, trials = self.first_trial - self.folder, self.last_event - self.first_trial
        return self.folder, server, trials, self.losses, self.proof, self.answer - self.last_event


def command(checkout: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-c", _LADDER, *arguments]


def environment(checkout: Path, caches: Path) -> dict[str, str]:
    """Ours, with the code of `checkout`, and caches of its own."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH")))),
        "TORCH_EXTENSIONS_DIR": str(caches / "operators"),
        "LADDER_CACHE": str(caches / "ladder"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "PYTHONSAFEPATH": "1",  # otherwise Python would look for `ladder` in the current folder first
    }


def run_once(name: str, checkout: Path, arguments: Sequence[str], caches: Path, keep: Path | None = None) -> Timed:
    """Time one tune, whose run folder goes to `keep`. RuntimeError with the end of its output if it fails."""
    with tempfile.TemporaryDirectory(prefix="time-to-answer-") as folder:
        run_dir, began = Path(folder) / "run", time.monotonic()
        process = subprocess.Popen(
            command(checkout, "tune", *arguments, "--run-dir", str(run_dir), "--quiet"),
            cwd=folder,
            env=environment(checkout, caches),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        folder_there = None
        while process.poll() is None and folder_there is None:
            if (run_dir / "journal.log").exists():
                folder_there = time.monotonic() - began
            time.sleep(0.005)
        output, _ = process.communicate(timeout=_MOST_SECONDS)
        answer = time.monotonic() - began
        if process.returncode != 0:
            raise RuntimeError(f"the tune of {name} ended with status {process.returncode}: {output[-2000:]}")
        if keep is not None:
            shutil.copytree(run_dir, keep, dirs_exist_ok=True)
        return _timed(name, run_dir, began, folder_there or 0.0, answer)


def _timed(name: str, run_dir: Path, began: float, folder_there: float, answer: float) -> Timed:
    spans: dict[str, tuple[float, float]] = {}
    purposes: dict[str, str] = {}
    for trial in sorted((run_dir / "trials").iterdir()):
        events = [json.loads(line) for line in (trial / "rank0.jsonl").read_text().splitlines()]
        times = [event["t"] - began for event in events if "t" in event]
        if times:
            spans[trial.name] = (min(times), max(times))
            purposes[trial.name] = _purpose(json.loads((trial / "spec.json").read_text()))

    def seconds_of(purpose: str) -> float:
        return sum(end - start for trial, (start, end) in spans.items() if purposes[trial] == purpose)

    return Timed(
        name=name,
        folder=folder_there,
        first_trial=min(start for start, _ in spans.values()),
        last_event=max(end for _, end in spans.values()),
        answer=answer,
        trials=len(spans),
        losses=seconds_of("losses"),
        proof=seconds_of("proof"),
    )


def _purpose(spec: dict[str, object]) -> str:
    return "losses" if spec["parity"] else "proof" if spec["proof"] else "measure"


def compare(checkouts: dict[str, Path], arguments: Sequence[str], options: argparse.Namespace) -> list[Timed]:
    """Each checkout `options.repeats` times, in turn."""
    timed = []
    with tempfile.TemporaryDirectory(prefix="time-to-answer-caches-") as folder:
        for repeat in range(options.repeats):
            for name, checkout in checkouts.items():
                caches = Path(folder) / f"{name}-{0 if options.warm else repeat}"
                caches.mkdir(exist_ok=True)
                if options.warm and repeat == 0:
                    timed.append(run_once(f"{name}, empty caches", checkout, arguments, caches))
                if options.measure and name == "new" and not any((caches / "ladder").glob("machines/*")):
                    measured = command(checkout, "doctor", "--measure", *options.measure.split())
                    subprocess.run(measured, env=environment(checkout, caches), check=True, capture_output=True)
                keep = options.keep if name == "new" else None
                timed.append(run_once(name, checkout, arguments, caches, keep))
    return timed


def print_table(timed: Sequence[Timed]) -> None:
    heads = ("import", "server", "trials", "losses", "proof", "rest")
    print(f"{'':18}{'first trial':>12}{'answer':>9}{'trials':>8} " + "".join(f"{head:>8}" for head in heads))
    for each in timed:
        parts = "".join(f"{seconds:8.2f}" for seconds in each.parts)
        print(f"{each.name:18}{each.first_trial:12.2f}{each.answer:9.2f}{each.trials:8d} {parts}")


def main() -> int:
    own, arguments = sys.argv[1:], list(_SMOKE)
    if "--" in own:
        own, arguments = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, help="another checkout of ladder")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--warm", action="store_true", help="with operators built, and what earlier tunes taught")
    parser.add_argument("--measure", nargs="?", const=" ", help="measure the machine first; options for ladder doctor")
    parser.add_argument("--keep", type=Path, help="where to keep a run folder")
    options = parser.parse_args(own)
    old = {"old": options.old.resolve()} if options.old is not None else {}
    timed = compare({**old, "new": _HERE}, arguments, options)
    print_table(timed)
    new = [each for each in timed if each.name == "new"]
    answers = {name: statistics.median(each.answer for each in timed if each.name == name) for name in (*old, "new")}
    print(
        f"first_trial_seconds={statistics.median(each.first_trial for each in new):.2f} "
        f"answer_seconds={answers['new']:.2f} trials={round(statistics.median(each.trials for each in new))} "
        f"speedup={answers.get('old', answers['new']) / answers['new']:.2f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
