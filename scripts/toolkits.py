"""Which rungs the environments of training toolkits would have: `python scripts/toolkits.py [YYYY-MM-DD]`.

Resolves the newest release of each toolkit, and the newest of a year before, with `uv`, which must be on PATH; nothing
is installed. Writes docs/reference/toolkits.md. The date is the newest that a release may have (default: today).
"""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from ladder.backends.registry import RUNGS_BY_NAME, backend_of
from ladder.machine.versions import RANGES, is_within
from ladder.workload.source import resolve_model
from ladder.workload.workload import Workload

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "toolkits.md"
TOOLKITS = (
    "axolotl",
    "llamafactory",
    "verl",
    "lightning",
    "llm-foundry",
    "mosaicml",
    "openrlhf",
    "unsloth",
    "ms-swift",
    "nemo-automodel",
    "trl",
    "peft",
    "sentence-transformers",
    "torchtitan",
    "torchtune",
)
NEEDED = ("torch", "transformers", "accelerate")
"""What a rank imports, whatever the toolkit has of its own."""
_SECONDS = 300
_PAGE = """# The environments of training toolkits

Written by `scripts/toolkits.py`, which resolves each toolkit with torch, transformers and accelerate by `uv`: its
newest release, and the newest of a year before ({newest}, Python 3.11). Nothing was installed or trained.

**{inside} of {count} have versions that `ladder` trains with** ({ranges}; DeepSpeed may be missing), if `ladder` has
[an environment of its own](../how-to/own-environment.md). Where DeepSpeed is `none`, `pip install deepspeed` in the
toolkit's environment brings its rungs. *In part*: a version trains some of these rungs wrongly. With transformers
before 4.57, FSDP2 is for scripts without the Trainer.

{head}
RULE
{rows}
"""


def resolved(toolkit: str, newest: datetime.date) -> dict[str, str]:
    """By package: the versions that uv chooses with this toolkit. ValueError, with its reason, where it finds none."""
    asked = "\n".join((toolkit, *(name for name in NEEDED if name != toolkit)))
    command = ["uv", "pip", "compile", "-", "--quiet", "--no-header", "--no-annotate", "--python-version", "3.11"]
    command += ["--python-platform", "x86_64-manylinux_2_28", "--exclude-newer", newest.isoformat()]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        raise ValueError(" ".join(done.stderr.split()))
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", done.stdout, re.MULTILINE))


def lines(newest: datetime.date) -> Iterator[str]:
    """The rows of the table."""
    for toolkit in TOOLKITS:
        for date in (newest, newest.replace(year=newest.year - 1)):
            try:
                versions = resolved(toolkit, date)
            except ValueError as error:
                yield f"| {toolkit} | {date.year} | | | | | not resolved: {str(error)[:160]} |"
                continue
            shown = " | ".join(versions.get(name, "none") for name in RANGES)
            yield f"| {toolkit} {versions.get(toolkit, '')} | {date.year} | {shown} | {rungs_with(versions)} |"


def rungs_with(versions: Mapping[str, str]) -> str:
    """In words: the rungs of ladder in an environment with these `versions`."""
    outside = [name for name in NEEDED if not is_within(versions.get(name, ""), RANGES[name])]
    if outside:
        return f"outside: {', '.join(f'{name} {RANGES[name]}' for name in outside)}"
    workload = Workload(model=resolve_model("llama-3.2-1b"), task="causal-lm", seq_len=1024, global_batch_size=32)
    usable: dict[str, list[bool]] = {}
    for rung in RUNGS_BY_NAME.values():
        backend = backend_of(rung)
        has_it = not backend.package or is_within(versions.get(backend.package, ""), RANGES[backend.package])
        flawed = any(
            flaw.concerns(workload, rung) and is_within(versions.get(flaw.package, ""), flaw.versions)
            for flaw in backend.flaws(workload)
        )
        family = "DeepSpeed" if backend.package else "FSDP2" if rung.stage else "DDP"
        usable.setdefault(family, []).append(has_it and not flawed)
    words = [f"{name} in part" if not all(each) else name for name, each in sorted(usable.items()) if any(each)]
    return ", ".join(words)


def main(words: list[str]) -> int:
    newest = datetime.date.fromisoformat(words[0]) if words else datetime.date.today()
    rows = list(lines(newest))
    inside = sum("outside" not in row and "not resolved" not in row for row in rows)
    ranges = ", ".join(f"{name} {versions}" for name, versions in RANGES.items())
    head = "| toolkit | as of | " + " | ".join(RANGES) + " | rungs |"
    text = _PAGE.format(newest=newest, inside=inside, count=len(rows), ranges=ranges, head=head, rows="\n".join(rows))
    PAGE.write_text(text.replace("RULE", "| --- " * (len(RANGES) + 3) + "|"))
    print(f"{inside} of {len(rows)} inside; wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
