"""Keys, hosts, limits, metrics and the log; and ends of connections."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from scripts_as_modules import load_script
from waiting import wait_for

from sparsekv_cli.commands.serve import is_loopback
from sparsekv_cli.serve.app import Access

CHAT = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "hello secret"}], "max_tokens": 4}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any]) -> Any:
    access = Access(api_key="sesame", origins=("https://example.org",))
    return serve(access=access, n_parallel=1, n_queue=1, seconds=20.0)


@pytest.fixture(scope="module")
def open_server(serve: Callable[..., Any]) -> Any:
    return serve(access=Access(origins=("https://example.org",)))


@pytest.fixture(scope="module")
def client(server: Any) -> Any:
    with httpx.Client(base_url=server.url, timeout=240) as client:
        client.headers["authorization"] = "Bearer sesame"
        yield client


def test_who_may_ask(client: httpx.Client, server: Any) -> None:
    assert client.get("/health").json()["status"] == "ok"
    for headers in ({"authorization": "Bearer wrong"}, {"authorization": "sesame"}):
        refused = client.post(CHAT, json=ASKED, headers=headers)
        assert refused.status_code == 401 and refused.json()["error"]["type"]
    refused = client.post("/v1/messages", json=ASKED, headers={"authorization": ""})
    assert refused.json()["type"] == "error"
    by_name = {"authorization": "", "x-api-key": "sesame"}
    assert client.post(CHAT, json=ASKED, headers=by_name).status_code == 200
    assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 421
    page = client.get("/", headers={"authorization": ""})
    assert "default-src 'none'" in page.headers["content-security-policy"]
    script = client.get("/static/app.js", headers={"authorization": ""})
    assert script.status_code == 200, "the page asks for the key itself"
    for path in ("/static/../v1/models", "/static/%2e%2e/v1/models", "/static"):
        found = client.get(path, headers={"authorization": "", "host": "localhost"})
        assert found.status_code in (401, 404), path
    origin = {"origin": "https://example.org", "access-control-request-method": "POST"}
    allowed = client.options(CHAT, headers=origin)
    assert allowed.headers["access-control-allow-origin"] == "https://example.org"
    other = client.options(CHAT, headers={**origin, "origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    hosts = ("127.0.0.1", "::1", "0.0.0.0", "x.org")
    assert [is_loopback(host) for host in hosts] == [True, True, False, False]


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
@pytest.mark.parametrize(
    ("headers", "is_foreign"),
    [
        ({}, False),
        ({"sec-fetch-site": "none"}, False),
        ({"sec-fetch-site": "same-origin", "origin": "https://proxy.example"}, False),
        ({"origin": "http://127.0.0.1:PORT"}, False),
        ({"origin": "https://example.org", "sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "cross-site"}, True),
        ({"sec-fetch-site": "same-site"}, True),  # another port of this machine
        ({"origin": "https://evil.example"}, True),
        ({"origin": "null", "sec-fetch-site": "cross-site"}, True),
    ],
)
def test_pages_of_other_origins_change_nothing(
    open_server: Any, method: str, headers: dict[str, str], is_foreign: bool
) -> None:
    """An image tag is a GET, and it must not load a model."""
    port = open_server.url.rpartition(":")[2]
    given = {name: value.replace("PORT", port) for name, value in headers.items()}
    path = f"{open_server.url}/props?model=any"
    answer = httpx.request(method, path, headers=given, timeout=240)
    assert (answer.status_code == 403) == is_foreign, answer.text
    page = httpx.get(open_server.url, headers=given, timeout=240)
    assert page.status_code == 200, "a link to the page works"


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", JSON, 400), (b"[1]", JSON, 400), (b'{"messages": "\\ud800"}', JSON, 400),
        (b"[" * 60_000, JSON, 400), (b"\xff", JSON, 400), (b" " * (1 << 17), JSON, 413),
        (b"{}", {"content-type": "text/plain"}, 415),
    ],
)  # fmt: skip
def test_bodies(client: httpx.Client, content: bytes, headers: Any, status: int) -> None:
    answer = client.post(CHAT, content=content, headers=headers)
    assert answer.status_code == status and answer.json()["error"]["message"]


def test_a_client_that_goes_frees_its_place(client: httpx.Client, server: Any) -> None:
    asked = {**ASKED, "max_tokens": 64, "stream": True, "ignore_eos": True}
    scheduler = server.service.scheduler
    n_aborted = scheduler.stats.n_aborted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler._running, "step", lambda: time.sleep(0.02))
        with client.stream("POST", CHAT, json=asked) as response:
            first = response.iter_text()  # which closes the connection when it is collected
            assert next(first)
            wait_for(lambda: scheduler.n_running == 1)
            with client.stream("POST", CHAT, json=asked) as waiting:
                second = waiting.iter_text()
                assert next(second)
                wait_for(lambda: scheduler.n_waiting == 1)
                full = client.post(CHAT, json=ASKED)
                assert full.status_code == 429 and full.headers["retry-after"]
                for path in ("/v1/messages", "/v1/responses"):
                    own = {"input": "hello"} if path == "/v1/responses" else ASKED
                    assert client.post(path, json={**own, "stream": True}).status_code == 429
        wait_for(lambda: scheduler.stats.n_aborted == n_aborted + 2)
        assert scheduler.n_waiting == scheduler.n_running == 0
    assert client.post(CHAT, json=ASKED).status_code == 200


def test_metrics_and_the_log(client: httpx.Client, server: Any) -> None:
    assert client.post(CHAT, json=ASKED).status_code == 200
    text = client.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["sparsekv_generated_tokens_total"]) >= 4
    assert float(values["sparsekv_rows_attended_total"]) > 0
    assert float(values['sparsekv_requests_total{path="/v1/chat/completions",status="200"}']) >= 1
    assert any(line.startswith(f"POST {CHAT} 200 ") for line in server.log)
    agents = load_script("references/agents")  # it reads these lines
    long = [{"role": "user", "content": "hello secret " * 20}]
    for path in (CHAT, CHAT, "/v1/messages"):
        asked, n = {**ASKED, "messages": long, "stream": True}, len(server.log)
        assert client.post(path, json=asked).status_code == 200
        wait_for(lambda n=n: len(server.log) > n)
        (found,) = agents.requests_of(server.log[-1] + "\n", 1)
        assert found["cached"] <= found["prompt"] and found["answer"] == 4
    assert found["cached"] > 16
    row = agents.row_of("x", "1.0", [{**found, "turn": 1, "cached": 0}, found | {"turn": 2}])
    assert row["first"] == f"{found['prompt']} / 0" and row["last"].endswith(str(found["cached"]))
    for second in ("07", "38"):
        system = {"role": "system", "content": f"It is 12:01:{second}, secret. {'Be brief. ' * 20}"}
        asked, n = {**ASKED, "messages": [system, *ASKED["messages"]]}, len(server.log)
        about = client.post(CHAT, json=asked).json()["sparsekv"]
        wait_for(lambda n=n: len(server.log) > n)
    told = about["difference"]
    assert told["cause"] == "a clock" and told["before"].endswith("It is 12:01:")
    assert told["now"].startswith("38") and told["n_again"] > 100 and "kept" not in told
    assert server.log[-1].endswith(
        "behind token {token}; the cause seems to be {cause}".format(**told)
    )
    assert 'sparsekv_prompt_differences_total{cause="a clock"} 1.0' in client.get("/metrics").text
    client.post(CHAT, json={**ASKED, "temprature": 1})
    wait_for(lambda: f"POST {CHAT} 400 " in server.log[-1])
    row = agents.row_of("x", "1.0", agents.requests_of(server.log[-1] + "\n", 1))
    assert (row["n"], row["refused"], row["without"]) == (1, 1, 0) and row["first"] == "-"
    assert not any("secret" in line for line in server.log)


def test_passages_of_earlier_prompts_are_counted(serve: Callable[..., Any]) -> None:
    """A changed first line moves the rows after it; a request that goes on keeps them."""
    server = serve(ctx_size=2048, body_bytes=1 << 20, repair=0.25)
    document = " ".join(f"Line {i}: the ship had left before the rain." for i in range(12))
    with httpx.Client(base_url=server.url, timeout=240) as client:

        def asked(first_line: str, more: str = "") -> dict[str, Any]:
            content = f"{first_line}. {document}{more}"
            messages = [{"role": "user", "content": content}]
            answer = client.post(CHAT, json={"messages": messages, "max_tokens": 2}).json()
            return answer["usage"]["prompt_tokens_details"] | answer["sparsekv"]

        assert "reused_tokens" not in asked("It is 10:31")
        moved = asked("It is 9:05 on a Tuesday")
        assert moved["reused_tokens"] > 100
        assert moved["repaired_tokens"] == -(-moved["reused_tokens"] // 4)
        later = asked("It is 9:05 on a Tuesday", " And then?")
        assert later["cached_tokens"] > later["reused_tokens"]
        # The end of the prompt was moved too; the later one has other tokens there.
        assert 0 < moved["reused_tokens"] - later["reused_tokens"] < 20
        counts = client.get("/metrics").text
    assert f"\nsparsekv_reused_tokens_total {moved['reused_tokens']}" in counts
    assert any(f"{moved['reused_tokens']} moved" in line for line in server.log)
