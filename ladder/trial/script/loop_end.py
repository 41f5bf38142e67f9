"""Where the loop ends in which a script trains: no line after it may run in a trial."""

from __future__ import annotations

import ast
import linecache
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dis import opmap
from types import FrameType
from typing import Any

_Place = tuple[FrameType, int]
"""A function that runs, and its line."""
_Loop = tuple[FrameType, range]
"""A function that runs, and the lines of a loop in it."""
_NOT_THE_SCRIPT_S = ("ladder.", "runpy", "threading")


class LoopEnd:
    """Calls `ended` when the script leaves its loop: by a break, a return, or an error, which `ended` is given.

    The loop is the innermost one that draws a batch, makes a backward pass and, before it ends, calls the optimizer.
    One that ends with the micro-steps of an optimizer step is within it.
    Python tells of each line of it, which is as good as free: it is told so of no other function, and not at all while
    the engine works (`paused`).
    """

    def __init__(self) -> None:
        self.ended: Callable[[BaseException | None], None] = lambda error: None
        self.accumulation = 1
        """Micro-steps in an optimizer step of the script's own."""
        self._drawn: list[_Place] = []
        self._loops: list[_Loop] = []
        """From the inside outwards; the first one is watched."""
        self._num_passes, self._has_stepped = 0, False
        self.error: BaseException | None = None
        """Which has reached the loop, and is not handled."""
        self._thread = 0

    def note_draw(self) -> None:
        """The script asks for a batch."""
        if not self._loops:
            self._drawn = _stack()

    def note_backward(self) -> None:
        """The script trains: this is its loop."""
        self._num_passes += 1
        if self._loops:
            return
        now, self._drawn, drawn = _stack(), [], self._drawn
        self._loops = _loops_around(now, dict(drawn)) or _loops_around(now, {})
        self._thread = threading.get_ident()
        if self._loops:
            self._loops[0][0].f_trace = self._told
            sys.settrace(_of_no_other)

    def note_step(self) -> None:
        """The script calls its optimizer or engine, which may leave the micro-step at that."""
        self._has_stepped = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While something else than the script works."""
        is_ours = threading.get_ident() == self._thread
        if is_ours:
            sys.settrace(None)
        try:
            yield
        finally:
            if self._loops and threading.get_ident() == self._thread:
                sys.settrace(_of_no_other)

    def _told(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "exception":
            self.error = argument[1].with_traceback(argument[2])
        elif event == "line" and frame.f_lineno in self._loops[0][1]:
            self.error = None
        elif event == "line" or (event == "return" and (self.error is not None or not _only_yields(frame))):
            self._left(frame, event)
        return self._told

    def _left(self, frame: FrameType, event: str) -> None:
        frame.f_trace = None
        is_within = not self._has_stepped or self._num_passes <= self.accumulation
        while self.error is None and is_within and len(self._loops) > 1:
            self._loops.pop(0)
            outer, lines = self._loops[0]
            if outer is not frame or (event == "line" and frame.f_lineno in lines):
                outer.f_trace = self._told
                return
        sys.settrace(None)
        self.ended(None if isinstance(self.error, GeneratorExit) else self.error)


def _of_no_other(*_: Any) -> None:
    """Functions that begin are not watched."""


def _only_yields(frame: FrameType) -> bool:
    """Whether a generator, in which a script may train too, is about to go on later."""
    return frame.f_code.co_code[frame.f_lasti] == opmap["YIELD_VALUE"]


def _stack() -> list[_Place]:
    """The script's own part of what runs, from the inside outwards."""
    places, frame = list[_Place](), sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(_NOT_THE_SCRIPT_S):
            places.append((frame, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return places


def _loops_around(places: list[_Place], drawn: dict[FrameType, int]) -> list[_Loop]:
    """Around the `places`, from the inside outwards; only those that `drawn` is in too, if it has any."""
    found = []
    for frame, line in places:
        lines = {line, drawn[frame]} if frame in drawn else {line}
        if frame in drawn or not drawn:
            found += [(frame, loop) for loop in _loops_in(frame) if lines <= set(loop)]
    return found


def _loops_in(frame: FrameType) -> list[range]:
    """The lines of each loop in the file of `frame`, smaller ones first; none where there is no source."""
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    except SyntaxError:
        return []
    loops = [each for each in ast.walk(tree) if isinstance(each, ast.For | ast.While | ast.AsyncFor)]
    lines = [range(each.lineno, (each.body[-1].end_lineno or each.lineno) + 1) for each in loops]
    return sorted(lines, key=len)
