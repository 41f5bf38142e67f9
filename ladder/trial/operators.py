"""Builds one DeepSpeed operator in a process of its own: `python -m ladder.trial.operators cpu_adam`.

Operators compile on first use, and two ranks compiling the same one at once can fail; so each is built before trials.
Exit status 0 means it is built and loads; otherwise the last line on stderr says why not.
"""

from __future__ import annotations

import sys

# Our names and the builders DeepSpeed has for them.
BUILDERS = {"cpu_adam": "CPUAdamBuilder", "async_io": "AsyncIOBuilder", "shm_comm": "ShareMemCommBuilder"}


def load(name: str) -> None:
    """Compile operator `name` if need be, and load it into this process. Raises what the build raises."""
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder(BUILDERS[name])
    if builder is None:
        raise RuntimeError(f"DeepSpeed has no {name} operator for this device")
    builder.load(verbose=False)


def main() -> int:
    try:
        load(sys.argv[1])
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = next((line for line in lines if "error" in line.lower()), lines[0] if lines else type(error).__name__)
        print(reason[:400], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
