"""Recorded sessions of agents: no request is refused, and each finds more rows than the one before.

Without ``--all``, one session for each address that clients ask.

A file of tests/data/agents has the requests of a client with its texts cut. ``keep`` says how many
messages of the request before stay. The fields of the request before stay, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

SAMPLE = ("aider", "claude_opus", "codex")
SESSIONS = sorted(Path(__file__).parents[2].joinpath("data/agents").glob("*.json"))


def requests_of(session: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the requests of a session, each as a whole."""
    before: dict[str, Any] = {}
    for stored in session["requests"]:
        name, n = session["list"], stored["keep"]
        items = [*before.get(name, [])[:n], *stored[name]]
        before = {**before, **stored, name: items}
        yield {key: value for key, value in before.items() if key != "keep"}


def cached_of(text: str) -> int:
    """Returns the prompt's tokens that had rows, from the last usage of an answer."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")] or [text]
    for event in map(json.loads, reversed(lines)):
        usage = event.get("usage") or event.get("response", {}).get("usage") or {}
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
        for key in ("cached_tokens", "cache_read_input_tokens"):
            if key in details:
                return details[key]
    raise AssertionError(text[-500:])


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any]) -> Any:
    return serve(tokens=4, ctx_size=16384, body_bytes=1 << 20)


def test_the_sample_has_every_address() -> None:
    addresses = {path.stem: json.loads(path.read_text())["path"] for path in SESSIONS}
    assert {addresses[name] for name in SAMPLE} == set(addresses.values())


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=() if path.stem in SAMPLE else pytest.mark.nightly)
        for path in SESSIONS
    ],
)
def test_a_session_of_an_agent(server: Any, path: Path) -> None:
    session = json.loads(path.read_text())
    cached = []
    for fields in requests_of(session):
        if session["path"] == "/v1/chat/completions" and fields.get("stream"):
            fields["stream_options"] = {"include_usage": True}  # aider does not ask for it
        answer = httpx.post(server.url + session["path"], json=fields, timeout=120)
        assert answer.status_code == 200, answer.text
        assert "response.failed" not in answer.text and "event: error" not in answer.text
        cached.append(cached_of(answer.text))
    assert len(cached) >= 4 and cached[1:] == sorted(set(cached[1:])), cached
    assert cached[1] > cached[0] or cached[0] > 0
