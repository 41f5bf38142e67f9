"""Putting a function of ours in the place of a library's method."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Put `wrapper`, whose first argument is the method that it replaces, in the place of `owner.name`."""
    own = getattr(owner, name)

    @functools.wraps(own)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        return wrapper(own, *arguments, **options)

    setattr(owner, name, wrapped)
