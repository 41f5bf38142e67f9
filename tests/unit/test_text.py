"""Data in messages stays data: one line, no control characters, and readable otherwise."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ladder.text import shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("an ordinary name", "an ordinary name"),
        ("Größe – 大", "Größe – 大"),
        ('it\'s "quoted"', 'it\'s "quoted"'),
        ("two\nlines\tand a tab", r"two\nlines\tand a tab"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("\u202eturned round", r"\u202eturned round"),
        (os.fsdecode(b"not \xff text"), r"not \udcff text"),
        (Path("a/b c"), "a/b c"),
        (ValueError("bad\rvalue"), r"bad\rvalue"),
        (None, "None"),
    ],
)
def test_what_is_shown_is_one_line_that_drives_no_terminal(value: object, text: str) -> None:
    assert shown(value) == text
    assert shown(value).isprintable()
