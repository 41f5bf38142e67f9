"""What the Hub's answers lead to, against a local HTTP server.

Each in a process of its own, because huggingface_hub reads its settings when it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUNDLED, UNKNOWN = "meta-llama/Llama-2-7b-hf", "someone/private-model"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
RESOLVE = """
import json, sys, time
from ladder.errors import LadderError
from ladder.workload.counted import Counted, shipped
from ladder.workload.source import resolve_model
sizes = shipped(resolve_model("tiny-llama").config, None).sizes
def count(config, task, adapters):  # transformers would take seconds
    return Counted(tasks=("causal-lm",), sizes={**sizes, "num_layers": config["num_hidden_layers"]})
for model in sys.argv[1:]:
    start = time.monotonic()
    try:
        shape = resolve_model(model, count=count)
        answer = {"source": shape.source, "note": shape.note, "layers": shape.num_layers}
    except LadderError as error:
        answer = {"error": str(error), "exit_code": error.exit_code}
    print(json.dumps(answer | {"seconds": time.monotonic() - start}))
"""


class Hub(BaseHTTPRequestHandler):
    """Answers every request in the way its server was set up; writes down who asked for what."""

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        server: Any = self.server
        server.seen.append((self.path, self.headers.get("Authorization")))
        if server.delay:
            server.closing.wait(server.delay)
        try:
            self.send_response(server.status)
            for name, value in server.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(server.body)))
            self.end_headers()
            if with_body:
                self.wfile.write(server.body)
        except OSError:  # the client gave up
            pass

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: pytest's output is no place for an access log."""


@pytest.fixture
def hub() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.status, server.headers, server.body, server.delay = 200, {}, b"", 0
    server.seen, server.closing = [], threading.Event()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()


def serve(hub: Any, config: Any) -> None:
    hub.status, hub.body = 200, json.dumps(config).encode()
    hub.headers = {"ETag": '"0123abcd"', "X-Repo-Commit": "a" * 40}


def refuse(hub: Any, status: int, code: str) -> None:
    hub.status, hub.body, hub.headers = status, b"", {"X-Error-Code": code, "X-Error-Message": "no"}


def resolve(model: str, hub: Any, cache: Path, **environment: str) -> dict[str, Any]:
    (answer,) = resolved([model], hub, cache, **environment)
    return answer


def resolved(models: list[str], hub: Any, cache: Path, **environment: str) -> list[dict[str, Any]]:
    """What a fresh process makes of each of the `models`; `hub` is a server or a port.

    Telemetry is off, so that huggingface_hub makes no request of its own and ours can be counted.
    """
    port = hub if isinstance(hub, int) else hub.server_address[1]
    clean = {
        key: value for key, value in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()
    }
    settings = {
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": f"http://127.0.0.1:{port}",
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    completed = subprocess.run(
        [sys.executable, "-c", RESOLVE, *models],
        env=clean | settings | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert completed.stderr == ""
    return [json.loads(line) for line in completed.stdout.splitlines()]


def test_the_configuration_is_fetched_and_nothing_else_also_where_its_shape_is_bundled(
    hub: Any, tmp_path: Path
) -> None:
    serve(hub, CONFIG)
    for answer in resolved([UNKNOWN, BUNDLED], hub, tmp_path):
        assert (answer["source"], answer["layers"], answer["note"]) == ("hub", 3, "")
    assert {path for path, _ in hub.seen} == {f"/{model}/resolve/main/config.json" for model in (UNKNOWN, BUNDLED)}


def test_a_token_is_taken_from_the_login_and_rather_from_the_environment(hub: Any, tmp_path: Path) -> None:
    serve(hub, CONFIG)
    resolve(UNKNOWN, hub, tmp_path)
    assert {token for _, token in hub.seen} == {None}
    (tmp_path / "token").write_text("hf_stored")
    for model, environment, token in (
        ("someone/stored", {}, "Bearer hf_stored"),
        ("someone/given", {"HF_TOKEN": "hf_given"}, "Bearer hf_given"),
        ("someone/unasked", {"HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}, None),
    ):
        hub.seen.clear()
        resolve(model, hub, tmp_path, **environment)
        assert {token for _, token in hub.seen} == {token}


def test_a_gated_model_is_refused_with_its_page_and_the_login_that_is_missing(hub: Any, tmp_path: Path) -> None:
    refuse(hub, 403, "GatedRepo")
    without = resolve(UNKNOWN, hub, tmp_path)["error"]
    assert f"https://huggingface.co/{UNKNOWN} and run `hf auth login` (or set HF_TOKEN)" in without
    (tmp_path / "token").write_text("hf_stored")
    known = resolve(UNKNOWN, hub, tmp_path)["error"]
    assert "your token has no access to it" in known
    assert "hf auth login" not in known


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (401, "GatedRepo", ["gated", "licence", "HF_TOKEN"]),
        (404, "RepoNotFound", ["no public model"]),
        (404, "EntryNotFound", ["no config.json", "base model"]),
        (500, "", ["answered 500"]),
    ],
)
def test_a_refusal_is_told_for_an_unknown_model_and_bridged_for_a_bundled_one(
    hub: Any, tmp_path: Path, status: int, code: str, words: list[str]
) -> None:
    refuse(hub, status, code)
    unknown, bundled = resolved([UNKNOWN, BUNDLED], hub, tmp_path)
    assert unknown["exit_code"] == 5
    assert all(word in unknown["error"] for word in [*words, "folder with its config.json"])
    assert (bundled["source"], bundled["layers"]) == ("bundled", 32)
    assert words[0] in bundled["note"]
    assert len(hub.seen) == 2


def test_a_closed_port_is_given_up_at_once(hub: Any, tmp_path: Path) -> None:
    port = hub.server_address[1]
    hub.server_close()
    unknown, bundled = resolved([UNKNOWN, BUNDLED], port, tmp_path)
    assert "cannot be reached" in unknown["error"]
    assert bundled["source"] == "bundled"
    assert max(unknown["seconds"], bundled["seconds"]) < 4


def test_a_server_that_does_not_answer_is_given_up_within_ten_seconds(hub: Any, tmp_path: Path) -> None:
    hub.delay = 30
    start = time.monotonic()
    answer = resolve(BUNDLED, hub, tmp_path, HF_HUB_DISABLE_TELEMETRY="0")  # its own requests count too
    assert answer["source"] == "bundled"
    assert answer["seconds"] < 10
    assert time.monotonic() - start < 20  # nor does the process linger


def test_a_configuration_fetched_before_works_when_the_hub_is_gone(hub: Any, tmp_path: Path) -> None:
    serve(hub, CONFIG)
    resolve(UNKNOWN, hub, tmp_path)
    refuse(hub, 401, "GatedRepo")
    assert resolve(UNKNOWN, hub, tmp_path)["source"] == "hub"
    hub.seen.clear()
    assert resolve(UNKNOWN, hub, tmp_path, HF_HUB_OFFLINE="1")["source"] == "hub"
    assert hub.seen == []


def test_offline_asks_nobody_and_says_why(hub: Any, tmp_path: Path) -> None:
    unknown, bundled = resolved([UNKNOWN, BUNDLED], hub, tmp_path, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE" in unknown["error"]
    assert "HF_HUB_OFFLINE" in bundled["note"]
    assert hub.seen == []


def test_a_configuration_from_the_hub_that_would_run_code_is_refused_even_if_bundled(hub: Any, tmp_path: Path) -> None:
    serve(hub, CONFIG | {"use_kernels": True})
    assert "use_kernels" in resolve(BUNDLED, hub, tmp_path)["error"]


def test_a_configuration_too_large_is_not_downloaded(hub: Any, tmp_path: Path) -> None:
    serve(hub, CONFIG | {"padding": "x" * (1 << 20)})
    assert "1 MiB" in resolve(BUNDLED, hub, tmp_path)["error"]
    assert len(hub.seen) == 1
