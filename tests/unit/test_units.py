"""Sizes are read as people write them, and nothing else is taken for a size."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ladder.text import shown
from ladder.units import GIB, KIB, MIB, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("40GiB", 40 * GIB),
        ("700 MiB", 700 * MIB),
        ("24GB", 24 * 10**9),
        ("2TiB", 2048 * GIB),
        ("3kib", 3 * KIB),
        ("12B", 12),
    ],
)
def test_a_size_is_read_with_or_without_space_and_in_any_case(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "0B", "0.1B", "1e9", "nan", "inf", "40 GiB each", "40Gib/s", "1,5GiB"]
)
def test_what_is_no_size_above_zero_is_refused_and_quoted_and_a_number_alone_as_it_may_mean_gib(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size") as refusal:
        parse_bytes(text)
    assert repr(text) in str(refusal.value)
    with pytest.raises(ValueError, match="'40' has no unit; write it like 40GiB"):
        parse_bytes("40")


def test_a_size_is_written_in_gib_and_none_is_a_dash() -> None:
    assert format_bytes(1.5 * GIB) == "1.50 GiB"
    assert format_bytes(420 * MIB) == "0.41 GiB"
    assert format_bytes(13 * MIB) == "13 MiB"
    assert format_bytes(None) == "–"


# Data in messages stays data: one line, no control characters, and readable otherwise.


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
