"""Counts the bundled models with transformers, peft and liger-kernel, and writes what `plan` then needs no torch for.

    python scripts/count_bundled.py [NAME …]

Each model of configs/models has a file of its name in configs/counted; without a NAME all are written. liger-kernel
needs Triton, which can be installed without a GPU.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from ladder.launch.counting import COUNTED_BY, ask, asked_of
from ladder.workload.config_guard import checked_config
from ladder.workload.counted import FOLDERS, digest
from ladder.workload.source import bundled_models


def write(name: str, folder: Path) -> None:
    """Count the bundled model called `name` into a file in `folder`."""
    bundle = json.loads(bundled_models()[name].read_text(encoding="utf-8"))
    config, _ = checked_config(bundle["config"], name)
    reply = ask(asked_of(config, None))
    if reply is None or "block" not in reply.get("sizes", {}):
        sys.exit(f"{name}: {reply}")
    by = {package: version(package) for package in COUNTED_BY}
    folder.mkdir(exist_ok=True)
    rows = [json.dumps(row) for row in reply["sizes"].pop("rows")]
    text = json.dumps({digest(config): {**reply, "counted_by": by}}, indent=1)
    listed = ",\n    ".join(rows)
    text = text.replace('"sizes": {', f'"sizes": {{\n   "rows": [\n    {listed}\n   ],', 1)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    if find_spec("liger_kernel") is None:
        sys.exit("liger-kernel is not installed: without it, nothing is known of its kernels.")
    for each in sys.argv[1:] or bundled_models():
        write(each, FOLDERS[0])
        print(each)
