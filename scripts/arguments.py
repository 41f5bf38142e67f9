"""Write the stubs that tell editors and type checkers the options of the Python API: `python scripts/arguments.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

from ladder.options.answer import VerifyOptions
from ladder.options.declaring import declared
from ladder.options.plan import PlanOptions, ScaleOptions
from ladder.options.python_calls import taken
from ladder.options.tune import TuneOptions

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
    classes = [_stub(options, name, "Switches") for name, options in named.items()]
    classes.append(_stub(VerifyOptions, "VerifyArguments"))
    arguments = "\n".join([_HEAD.format(about="The options of tune, plan, scale and verify.") + _IMPORTS, *classes])
    head = _HEAD.format(about="The switches of techniques.") + "from typing import TypedDict\n\n"
    return {
        Path("ladder/options/arguments.pyi"): arguments,
        Path("ladder/techniques/switches.pyi"): head + _stub(TuneOptions, "Switches", contributed=True),
    }


def _stub(options: type, name: str, base: str = "TypedDict", *, contributed: bool = False) -> str:
    """The source of a TypedDict of the options, for type checkers and editors: of the fields, or of the `contributed`
    ones."""
    lines = [f"class {name}({base}, total=False):"]
    for each in declared(options).values():
        if each.option.is_argument or (each.key is not None) != contributed:
            continue
        lines.append(f"    {each.name}: {_in_source(taken(each))}")
    return "\n".join(lines) + "\n"


def _in_source(annotation: Any) -> str:
    """An annotation as source code, using the names that the stub imports."""
    text = annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)
    text = re.sub(r"\b(?:typing|collections\.abc|pathlib)\.(?:_local\.)?", "", text).replace("'", '"')
    return re.sub(r"^Optional\[(.*)\]$", r"\1 | None", text)


if __name__ == "__main__":
    for path, text in stubs().items():
        (ROOT / path).write_text(text, encoding="utf-8")
