"""What a command says of its options: help in panels, with nothing cut off at any width, and `ladder.yaml`."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from typer.core import TyperCommand

_NAMES_WIDTH = 30
"""Columns for an option's names; longer ones have their help on the lines below."""


class PanelledCommand(TyperCommand):
    """A command whose help shows long names and texts such as `[default: 128]` in full.

    typer's own help treats square brackets as rich's markup, and cuts long names at 80 columns. Before it runs, it says
    which options come from the file of defaults.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command, whose options are valid."""
        sources = {each: ctx.get_parameter_source(each.name) for each in self.params}
        from_file = [each for each, source in sources.items() if source is not None and source.name == "DEFAULT_MAP"]
        if from_file and not ctx.params.get("quiet"):
            said = ", ".join(f"{max(each.opts, key=len)} {ctx.default_map[each.name]}" for each in from_file)
            print(f"ladder.yaml sets {said} for ladder {ctx.info_name}.", file=sys.stderr)
        return super().invoke(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help on stdout."""
        from rich.console import Console, Group  # imported here because only the help needs it
        from rich.padding import Padding
        from rich.panel import Panel
        from rich.text import Text

        console = Console(highlight=False)
        usage = " ".join([ctx.command_path, *self.collect_usage_pieces(ctx)])
        console.print(Padding(Text.assemble(("Usage: ", "bold yellow"), (usage, "bold")), (1, 1)))
        for paragraph in inspect.cleandoc(self.help or "").split("\n\n"):
            indent = len(paragraph) - len(paragraph.lstrip())
            text = Text(" ".join(paragraph.split()))
            console.print(Padding(text, (0, 0, 1, 1 + indent)))
        for title, params in _panels(self.get_params(ctx)).items():
            rows = [_row(*record) for each in params if (record := _record(each, ctx)) is not None]
            console.print(Panel(Group(*rows), title=title, title_align="left", border_style="dim"))


def _panels(params: list[Any]) -> dict[str, list[Any]]:
    """The parameters by panel: arguments first, then panels in the order of their first option, then other options."""
    panels: dict[str, list[Any]] = {"Arguments": []}
    others: list[Any] = []
    for each in params:
        title = getattr(each, "rich_help_panel", None) or ("Arguments" if _is_argument(each) else None)
        (panels.setdefault(title, []) if title else others).append(each)
    return {title: found for title, found in {**panels, "Options": others}.items() if found}


def _is_argument(param: Any) -> bool:
    return bool(param.param_type_name == "argument")


def _record(param: Any, ctx: Any) -> tuple[str, str] | None:
    """The names and the help of a parameter; None if it is hidden."""
    record: tuple[str, str] | None = param.get_help_record(ctx)
    if record is None or not _is_argument(param):
        return record
    return (param.metavar or param.name).upper(), record[1]


def _row(names: str, text: str) -> Any:
    """A row of the help: an option's names, with its help beside or below them."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    name, help_text = Text(names, "cyan"), Text(" ".join(text.split()))
    if len(names) > _NAMES_WIDTH:
        return Group(name, Padding(help_text, (0, 0, 0, _NAMES_WIDTH + 1)))
    row = Table.grid(padding=(0, 1, 0, 0))
    row.add_column(width=_NAMES_WIDTH)
    row.add_column(ratio=1)
    row.add_row(name, help_text)
    return row
