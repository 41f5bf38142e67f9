"""The switches of techniques. Written by scripts/arguments.py from what is declared."""

from typing import TypedDict

class Switches(TypedDict, total=False):
    liger: bool | None
    hybrid: bool | None
    divided_gradients: bool | None
