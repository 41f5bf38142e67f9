"""Help that says what is written: typer takes square brackets for rich's markup, and leaves out what is in them."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class LiteralCommand(TyperCommand):
    """A command in whose help `[default: 128]` and `pip install 'package[extra]'` stay as they are."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from rich.markup import escape  # here: only help needs it

        helped: list[Any] = [self, *self.params]  # made anew for each start, so that none is escaped twice
        for each in helped:
            each.help = escape(each.help or "")
        super().format_help(ctx, formatter)
