"""Write the stubs that tell editors and type checkers the options of the Python API: `python scripts/arguments.py`."""

from __future__ import annotations

from pathlib import Path

from ladder.tuning.answer_options import VerifyOptions
from ladder.tuning.options import TuneOptions
from ladder.tuning.plan_options import PlanOptions
from ladder.tuning.python_calls import stub
from ladder.tuning.scale_options import ScaleOptions

ROOT = Path(__file__).parents[1]
_HEAD = '"""{about} Written by scripts/arguments.py from what is declared."""\n\n'
_IMPORTS = """from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict

from ladder.techniques.switches import Switches
"""


def stubs() -> dict[Path, str]:
    """The text of each stub, by its path in the repository."""
    named = {"TuneArguments": TuneOptions, "PlanArguments": PlanOptions, "ScaleArguments": ScaleOptions}
    classes = [stub(options, name, "Switches") for name, options in named.items()]
    classes.append(stub(VerifyOptions, "VerifyArguments"))
    arguments = "\n".join([_HEAD.format(about="The options of tune, plan, scale and verify.") + _IMPORTS, *classes])
    head = _HEAD.format(about="The switches of techniques.") + "from typing import TypedDict\n\n"
    return {
        Path("ladder/tuning/arguments.pyi"): arguments,
        Path("ladder/techniques/switches.pyi"): head + stub(TuneOptions, "Switches", contributed=True),
    }


if __name__ == "__main__":
    for path, text in stubs().items():
        (ROOT / path).write_text(text, encoding="utf-8")
