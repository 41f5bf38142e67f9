"""A page at localhost that follows a tune while it runs."""

from __future__ import annotations

import io
import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from rich.console import Console

from ladder.tuning.tune_events import Subscriber, TuneEnds, TuneEvent
from ladder.watch.live import Drawing

_PAGE = Path(__file__).with_name("page.html")
_FEWEST, _MOST = 40, 200
"""Columns of the drawing, whatever a browser asks for. Chosen: the narrowest for which it is made, and wide enough."""
_GOODBYE_SECONDS = 2.0
"""Chosen: the page asks every second."""
_LINES = 200
"""Of the drawing, which a page need not crop. Chosen: more than engines."""


class _Following:
    """What the page shows: the drawing of the tune at this moment, what was said, and how it ended.

    Requests come on threads of their own.
    """

    def __init__(self) -> None:
        self._said: list[str] = []
        self._drawing = Drawing(self._said.append)
        self._ended = ""
        self._is_looked_at, self._is_told = False, threading.Event()

    def __call__(self, event: TuneEvent) -> None:
        self._drawing(event)
        if isinstance(event, TuneEnds):
            self._ended = event.answer.candidate.key if event.answer is not None else event.stopped

    def say_goodbye(self) -> None:
        """Wait a moment for a page that is open to hear how the tune ended."""
        if self._is_looked_at and self._ended:
            self._is_told.wait(_GOODBYE_SECONDS)

    def as_json(self, columns: int) -> str:
        """The drawing as HTML, `columns` wide, with colours by class, whose rules differ by theme in the page."""
        paper = Console(
            file=io.StringIO(), record=True, width=columns, height=_LINES, highlight=False, force_terminal=True
        )
        paper.print(self._drawing)
        self._is_looked_at = True
        if self._ended:
            self._is_told.set()
        drawn = paper.export_html(inline_styles=True, code_format="{code}")
        return json.dumps(
            {"headline": self._drawing.headline(), "drawn": drawn, "said": self._said, "ended": self._ended}
        )


@contextmanager
def followed_at() -> Iterator[tuple[Subscriber, str]]:
    """A subscriber, and the address at which a browser of this host sees what it hears, until the end of the block.

    Only who knows the token in the address is answered.
    """
    following, token = _Following(), secrets.token_urlsafe(16)

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            if asked.path == f"/{token}/":
                self._send(_PAGE.read_text(encoding="utf-8"), "text/html")
            elif asked.path == f"/{token}/now":
                columns = parse_qs(asked.query).get("columns", [""])[0]
                wanted = int(columns) if columns.isdecimal() else _FEWEST
                self._send(following.as_json(min(max(wanted, _FEWEST), _MOST)), "application/json")
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

        def _send(self, text: str, kind: str) -> None:
            data = text.encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are nobody's business on stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, name="web", daemon=True)
        thread.start()
        try:
            yield following, f"http://127.0.0.1:{server.server_address[1]}/{token}/"
        finally:
            following.say_goodbye()
            server.shutdown()
            thread.join()
