"""For mkdocs: take the marks that tests/process/test_documents.py reads, as in "bash gpu", off code blocks."""

from __future__ import annotations

import re
from typing import Any

_MARKED = re.compile(r"^```(\w+) \w+$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page as Markdown; mkdocs knows no code blocks with a mark."""
    return _MARKED.sub(r"```\1", markdown)
