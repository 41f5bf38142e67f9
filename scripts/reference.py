"""Write the reference pages under docs/, and the exports that the how-to pages show, from the code.

`python scripts/reference.py` writes them; with `--check` it changes nothing, and ends with 1 where a page is
stale. What stands below the line `HAND` of a page is kept.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args

import reference_words as words
from options_page import options_page

import ladder
from ladder import errors
from ladder.backends.deepspeed.rungs import RUNGS
from ladder.candidates import Rung, Technique
from ladder.candidates.checkpointing import WayOfCheckpointing
from ladder.cli.main import app
from ladder.emit.config import SECTION
from ladder.emit.exporters.registry import exported
from ladder.events.outcome import OutcomeKind
from ladder.techniques.registry import TECHNIQUES, WAYS_OF_CHECKPOINTING

DOCS = Path(__file__).parents[1] / "docs"
HAND = "<!-- Written by hand from here on; all above is written by scripts/reference.py. -->"
EXPORT = re.compile(r"(<!-- ladder export --for (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
CONFIG = Path("/home/you/best_config.json")
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


class StaleError(Exception):
    """What the code has and `reference_words` does not explain, or the other way round."""


def options(document: Mapping[str, Any]) -> str:
    """Every command and option."""
    return options_page(app)


def rungs_and_techniques(document: Mapping[str, Any]) -> str:
    """Rungs, techniques and ways of checkpointing."""
    explained("rungs", [rung.name for rung in RUNGS], words.RUNGS)
    rungs = table(
        ("rung", "ZeRO stage and offload", "on each GPU", "what it costs", "use it when"),
        ((f"`{rung.name}`", _place(rung), *words.RUNGS[rung.name]) for rung in RUNGS),
    )
    beyond = ", ".join(f"`{rung.name}`" for rung in RUNGS if not rung.documented)
    techniques = table(
        ("technique", "what it is", "asked for by", "needs", "caution"),
        (_technique(technique) for technique in TECHNIQUES.values()),
    )
    ways = table(
        ("checkpointing", "what it is", "transformers"),
        [
            ("`off`", "no layer is computed again", "any"),
            ("`on`", "every layer is computed again", "any"),
            *((f"`{way.name}`", _first_line(way), f"{way.since} or later") for way in WAYS_OF_CHECKPOINTING.values()),
        ],
    )
    return f"""# Rungs and techniques

## Rungs

A *rung* is one way to divide the training over the GPUs: a ZeRO stage with its offload, as in this table, or DDP or
FSDP2 [without DeepSpeed](../how-to/without-deepspeed.md#what-is-tried). N is the number of parameters and W the number
of GPUs. With 16-bit training and Adam, each parameter takes 2 bytes, its gradient 2 to 4 bytes, and the
optimizer 12 bytes for a 32-bit copy and two moments. Activations come on top of all of these.

{rungs}

All rungs of this table except {beyond} form the documented ladder. A later rung is not always slower and not always
smaller.

## Techniques

A *technique* is an optional change to a rung. Its name follows a plus, as in `zero3+liger`.

{techniques}

## Ways of checkpointing

With gradient checkpointing a layer keeps only its input and is computed again during the backward pass, which
takes about a third more computing. In a candidate the way stands behind `ckpt=`.

{ways}
"""


def outcomes(document: Mapping[str, Any]) -> str:
    """How a trial ends."""
    explained("outcomes", get_args(OutcomeKind), words.OUTCOMES)
    rows = [(f"`{kind}`", *words.OUTCOMES[kind]) for kind in get_args(OutcomeKind)]
    return f"""# Outcomes

Every candidate that was tried has one outcome, in a sentence with the rank, the phase and the figures, as far as they
are known. A candidate counts as `fits` only if every rank has reported its figures; an exit code is not enough. If a
later candidate ends the trial, those before it still count.

{table(("outcome", "what happened", "what to do"), rows)}
"""


def exit_codes(document: Mapping[str, Any]) -> str:
    """What the command ends with."""
    classes = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.LadderError)]
    known = sorted(classes, key=lambda kind: kind.exit_code)
    explained("errors", [kind.__name__ for kind in known], words.EXITS)
    found = (errors.EXIT_FOUND, "", "The command did what it was asked to do.", "–")
    unexpected = "A bug in ladder: an error that it did not expect."
    bug = (f"{errors.EXIT_BUG}", "", unexpected, words.EXITS[errors.LadderError.__name__])
    rows = [
        (f"{kind.exit_code}", f"`{kind.__name__}`", inspect.getdoc(kind), words.EXITS[kind.__name__])
        for kind in known
        if kind is not errors.LadderError
    ]
    signals = [(code, "", *sentences) for code, sentences in words.SIGNALS.items()]
    return f"""# Exit codes

Every expected error is one sentence on stderr that says what happened and what to do. From Python each is an
exception of its own in `ladder.errors`, and all are of the class `LadderError`. `ladder run` ends as its training does:
with 0, or with 1 if a rank failed; and with 8 if the training lost steps.

{table(("code", "error", "meaning", "what to do"), [found, bug, *rows, *signals])}
"""


def best_config_schema(document: Mapping[str, Any]) -> str:
    """The "ladder" section of best_config.json."""
    keys = dict(_keys(document[SECTION]))
    techniques = {each.key: ("boolean", f"Whether the engine has {each.title}.") for each in TECHNIQUES.values()}
    described = techniques | words.KEYS
    explained("keys of best_config.json", keys, described)
    for key, value in keys.items():
        kinds = described[key][0].split(" or ")
        if ("null" if value is None else _TYPES[type(value)]) not in (*kinds, "integer" if "number" in kinds else ""):
            raise StaleError(f"{key} of best_config.json is {value!r}, and reference_words says {described[key][0]}")
    rows = ((f"`{key}`", described[key][0], described[key][1]) for key in keys)
    of_adapters = ((f"`workload.{key}`", kind, meaning) for key, (kind, meaning) in words.ADAPTER_KEYS.items())
    of_scripts = ((f"`script.{key}`", kind, meaning) for key, (kind, meaning) in words.SCRIPT_KEYS.items())
    plain = ((f"`plain.{key}`", kind, meaning) for key, (kind, meaning) in words.PLAIN_KEYS.items())
    return f"""# best_config.json

`best_config.json` is a DeepSpeed configuration with one extra section, `"ladder"`, which DeepSpeed ignores.
The section says what was measured. A dot in the table stands for an object
inside an object: `workload.seq_len` is `seq_len` in `workload`.

{table(("key", "type", "meaning"), rows)}

## Adapters

An answer for [adapters](../how-to/adapters.md), quantised or frozen weights also has those of these keys that apply.

{table(("key", "type", "meaning"), of_adapters)}

## Without DeepSpeed

If something is faster [without DeepSpeed](../how-to/without-deepspeed.md), the section names it. Its settings are in
`best_plain.json`, which has a section `"ladder"` of its own with the keys of this page, and in the files beside it.

{table(("key", "type", "meaning"), plain)}

## Your own script

An answer for [your own script](../how-to/own-script.md) also has these keys. Its `workload.seq_len` is the longest
sample.

{table(("key", "type", "meaning"), of_scripts)}

## Read it from Python

`ladder.load_best_config(path)` reads the file and raises an error if somebody edited it.
"""


def python_api(document: Mapping[str, Any]) -> str:
    """The public names."""
    public = {name: getattr(ladder, name) for name in ladder.__all__}
    functions = {name: value for name, value in public.items() if inspect.isfunction(value)}
    returned = (_returned(function) for function in functions.values())
    results = {kind.__name__: kind for kind in returned if is_dataclass(kind) and isinstance(kind, type)}
    others = {name: value for name, value in public.items() if inspect.isclass(value) and name not in results}
    raised = {name: kind for name, kind in others.items() if issubclass(kind, BaseException)}
    events = {name: kind for name, kind in others.items() if name not in raised}
    unions = {name: value for name, value in public.items() if name not in functions | results | others}
    return (
        "\n\n".join(
            [
                "# Python API\n\nThe names below are all there is in `ladder`. Options are those of the "
                "[commands](options.md), with underscores instead of dashes.",
                "## Functions",
                *(_function(name, function) for name, function in functions.items()),
                "## Results",
                *(_class(name, kind) for name, kind in results.items()),
                "## Events",
                "A callback of `ladder.tune` is called with these.",
                *(_class(name, kind) for name, kind in events.items()),
                *(f"### {name}\n\n{_union(value)}" for name, value in unions.items()),
                "## Errors",
                "Each error has the [exit code](exit-codes.md) that the command would end with.",
                table(("error", "meaning"), ((f"`{name}`", _about(kind)) for name, kind in raised.items())),
            ]
        )
        + "\n"
    )


PAGES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "options": options,
    "rungs-and-techniques": rungs_and_techniques,
    "outcomes": outcomes,
    "exit-codes": exit_codes,
    "best-config-schema": best_config_schema,
    "python-api": python_api,
}


def table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def explained(what: str, there: Iterable[str], described: Mapping[str, Any]) -> None:
    """StaleError where something is there without words, or words are about nothing."""
    names = list(there)
    if missing := [name for name in names if name not in described]:
        raise StaleError(f"{what} without a description in scripts/reference_words.py: {', '.join(missing)}")
    if extra := [name for name in described if name not in names]:
        raise StaleError(f"scripts/reference_words.py describes {what} that do not exist: {', '.join(extra)}")


def simulated_answer() -> dict[str, Any]:
    """The content of a best_config.json that a tune on a simulated machine wrote."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "best_config.json")
        ladder.tune(
            "meta-llama/Llama-2-7b-hf",
            launcher="simulated",
            machine="a100-80",
            gpus=4,
            liger=False,
            output=path,
            run_dir=Path(folder, "run"),
            quiet=True,
        )
        return ladder.load_best_config(path)


def with_exports(text: str, document: Mapping[str, Any]) -> str:
    """A how-to page, with what `ladder export` prints for `document` in the places it is shown."""

    def shown(match: re.Match[str]) -> str:
        opening, program, end = match.groups()
        said = exported(document, CONFIG, program)
        language = "json" if program == "trainer" else "bash" if said.startswith("#!") else "yaml"
        return f"{opening}```{language} shown\n{said}```\n{end}"

    return EXPORT.sub(shown, text)


def pages() -> Iterator[tuple[Path, str]]:
    """Every page with what it should hold."""
    document = simulated_answer()
    for name, page in PAGES.items():
        path = DOCS / "reference" / f"{name}.md"
        by_hand = path.read_text(encoding="utf-8").partition(HAND)[2] if path.exists() else ""
        yield path, page(document) + (f"\n{HAND}{by_hand}" if by_hand else "")
    for path in sorted((DOCS / "how-to").glob("*.md")):
        yield path, with_exports(path.read_text(encoding="utf-8"), document)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the reference pages from the code.")
    parser.add_argument("--check", action="store_true", help="change nothing; end with 1 if a page is stale")
    check = parser.parse_args(arguments).check
    try:
        stale = [
            (path, text) for path, text in pages() if not path.exists() or path.read_text(encoding="utf-8") != text
        ]
    except StaleError as error:
        print(error, file=sys.stderr)
        return 1
    for path, text in stale:
        where = path.relative_to(DOCS.parent)
        if check:
            print(f"{where} is stale; run `python scripts/reference.py`.", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {where}")
    return 1 if check and stale else 0


def _place(rung: Rung) -> str:
    names = {"cpu": "host", "nvme": "NVMe"}
    moved = {"optimizer": rung.offload_optimizer, "parameters": rung.offload_param}
    places = [f"{what} → {names[where]}" for what, where in moved.items() if where != "none"]
    return ", ".join([f"stage {rung.stage}", *places])


def _technique(technique: Technique) -> tuple[str, ...]:
    consent = technique.consent
    asked = f"`--{consent.switch}`; default: {consent.unset}" if consent.switch else f"`--allow {technique.name}`"
    needs = ", ".join(f"`{each.distribution}`{f' {each.since}' if each.since else ''}" for each in technique.libraries)
    return f"`+{technique.name}`", _first_line(technique), asked, needs or "–", consent.caution or "–"


def _first_line(known: Technique | WayOfCheckpointing) -> str:
    """What the module says of itself in its first line."""
    documentation = inspect.getdoc(inspect.getmodule(type(known))) or ""
    return re.sub(r"(https?://\S+)", r"<\1>", documentation.splitlines()[0])


def _keys(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        yield f"{prefix}{key}", value
        if isinstance(value, dict) and key not in words.OPEN_KEYS:
            yield from _keys(value, f"{prefix}{key}.")


def _returned(function: Any) -> Any:
    """The type that `function` says it returns, which is a name in its module."""
    name = function.__annotations__.get("return", "None")
    return getattr(sys.modules[function.__module__], name, None) if isinstance(name, str) else name


def _signature(name: str, function: Any) -> str:
    """As it would be written, a parameter a line where it is long."""
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(function)))  # annotations are texts
    if len(name + text) > 100:
        inside, _, result = text[1:].rpartition(")")
        text = "(\n" + "".join(f"    {part},\n" for part in re.split(r", (?![^\[(]*[\])])", inside)) + ")" + result
    return f"```text\n{name}{text}\n```"


def _function(name: str, function: Any) -> str:
    return f"### ladder.{name}\n\n{_signature(f'ladder.{name}', function)}\n\n{inspect.getdoc(function)}"


def _class(name: str, kind: type) -> str:
    fields = _fields(kind)
    parts = [f"### {name}", inspect.getdoc(kind) or ""]
    if fields:
        parts.append(
            "\n".join(["Fields:\n", *(f"- `{field}`: `{annotation}`" for field, annotation in fields.items())])
        )
    members = []
    for member, value in vars(kind).items():
        if not member.startswith("_") and (inspect.isfunction(value) or _is_property(value)):
            members.append(_member(f"`{member}{'' if _is_property(value) else '()'}`", _about(_getter(value))))
    if members:
        parts.append("\n".join(["Properties and methods:\n", *members]))
    return "\n\n".join(parts)


def _member(name: str, documentation: str) -> str:
    """A point of a list, with the lists of its documentation below it, each under its heading."""
    text, *blocks = documentation.split("\n\n")
    said = [text.replace("\n", " ")]
    lines = []
    for block in blocks:
        heading, *points = block.splitlines()
        if heading.startswith("- "):
            lines += [f"    {point}" for point in (heading, *points)]
        elif points and points[0].startswith("- "):
            lines += [f"    - {heading}", *(f"        {point}" for point in points)]
        else:
            said.append(block.replace("\n", " "))
    first = " ".join(filter(None, said))
    return "\n".join([f"- {name}{f': {first}' if first else ''}", *lines])


def _fields(kind: type) -> dict[str, str]:
    """The fields of a dataclass with their types as they are written."""
    return {name: str(annotation) for name, annotation in vars(kind).get("__annotations__", {}).items()}


def _about(described: Any) -> str:
    return inspect.getdoc(described) or ""


def _is_property(value: Any) -> bool:
    return isinstance(value, property) or hasattr(value, "attrname")


def _getter(value: Any) -> Any:
    return value.fget if isinstance(value, property) else getattr(value, "func", value)


def _union(value: Any) -> str:
    return "One of " + ", ".join(f"`{member.__name__}`" for member in get_args(value)) + "."


if __name__ == "__main__":
    sys.exit(main())
