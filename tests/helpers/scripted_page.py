"""A server that answers with what a test says, and what a person does with the page."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from waiting import wait_for

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.serve import page
from sparsekv_cli.serve.wire.documents import Documents

METHODS = ("full", "lfps", "topk", "fasa")
PARAMS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.0}
SWITCH = "enable_thinking"
Item = str | tuple[str, Any]
GATE, CUT = ("gate", None), ("cut", None)


class Scripted:
    """A server with the page. answers: of the next requests; asked: what they were.

    An item of an answer is a text, ("think", text), ("rows", rows), ("comment", text), GATE, at
    which the server waits for go(), or CUT, which ends the connection. An answer may be
    (status, message) instead. gated: documents that are read after go(); left: whether one's client
    has gone. slow: the seconds that it takes to describe a thing.
    """

    def __init__(self) -> None:
        self.url = ""
        self.answers: list[Sequence[Item] | tuple[int, str]] = []
        self.asked: list[dict[str, Any]] = []
        self.models = [self.model("tiny")]
        self.key, self.n_open, self.slow = "", 0, 0.0
        self.gated: set[str] = set()
        self.left = 0

    def go(self) -> None:
        """Lets an answer go on after a gate."""
        self.n_open += 1

    def app(self) -> Starlette:
        described = [Route(path, self.describe) for path in ("/v1/methods", "/v1/models", "/props")]
        chat = Route("/v1/chat/completions", self.chat, methods=["POST"])
        documents = Route("/documents", self.read, methods=["POST"])
        return Starlette(routes=[*page.routes(), *described, chat, documents])

    @staticmethod
    def model(name: str, methods: Sequence[str] = METHODS[:3]) -> dict[str, Any]:
        about = {"context_length": 1024, "methods": list(methods), "thinking_switch": SWITCH}
        return {"id": name, "status": "loaded", **about}

    async def describe(self, request: Request) -> Response:
        await asyncio.sleep(self.slow)
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "the API key is missing or wrong"}}, 401)
        methods = [{"name": name, "summary": f"what {name} does"} for name in METHODS]
        params = {**PARAMS, "seed": -1, "n_predict": 256}
        known = {
            "/v1/methods": {"default": "full", "methods": methods},
            "/v1/models": {"data": self.models},
            "/props": {"default_generation_settings": {"params": params}},
        }
        return JSONResponse(known[request.url.path])

    async def read(self, request: Request) -> Response:
        """Reads a document as the server does; of a first one in ``gated`` it waits for go()."""
        name, data = request.query_params["name"], await request.body()
        while name in self.gated and not self.n_open:
            self.left += await request.is_disconnected()
            await asyncio.sleep(0.01)
        try:
            return JSONResponse({"name": name, "text": await Documents(1 << 20).read(data, name)})
        except SparseKVError as error:
            return JSONResponse({"error": {"message": str(error)}}, 400)

    async def chat(self, request: Request) -> Response:
        self.asked.append(await request.json())
        answer = self.answers.pop(0)
        if isinstance(answer[0], int):
            return JSONResponse({"error": {"message": answer[1]}}, answer[0])
        return StreamingResponse(self.events(answer), media_type="text/event-stream")

    async def events(self, items: Sequence[Any]) -> AsyncIterator[str]:
        for item in items:
            kind, value = item if isinstance(item, tuple) else ("text", item)
            if kind == "gate":
                while not self.n_open:
                    await asyncio.sleep(0.01)
                self.n_open -= 1
            elif kind == "cut":
                return
            elif kind == "comment":
                yield f": {value}\n\n"
            elif kind == "rows":
                rows = {"rows": value, "tokens": 1, "accepted": 0}
                yield f"event: sparsekv.rows\ndata: {json.dumps(rows)}\n\n"
            else:
                delta = {"content" if kind == "text" else "reasoning_content": value}
                yield f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n"
        yield f"data: {json.dumps(LAST)}\n\ndata: [DONE]\n\n"


LAST = {
    "choices": [],
    "usage": {
        "prompt_tokens": 30, "completion_tokens": 12, "prompt_tokens_details": {"cached_tokens": 5}
    },
    "sparsekv": {
        "method": {"name": "lfps", "options": {"budget": "5%"}},
        "context": {"used": 42, "size": 1024},
        "timings": {"decode_s": 0.5},
        "ledger": {"rows_attended": 25, "rows_total": 100},
    },
}  # fmt: skip


SEEN = """
    return [...document.querySelectorAll(arguments[0])]
        .map(e => e.checkVisibility() ? e.innerText.trim() : '')
"""


class Page:
    """What a person does with the page."""

    def __init__(self, browser: Any, server: Scripted) -> None:
        self.browser, self.server = browser, server

    def open(self) -> None:
        self.browser.get(self.server.url)
        self.wait("#method option")

    def all(self, selector: str) -> list[Any]:
        return self.browser.find_elements("css selector", selector)

    def wait(self, selector: str) -> Any:
        return wait_for(lambda: self.all(selector))[-1]

    def texts(self, selector: str) -> list[str]:
        """The texts that are seen. The browser reads them at once, so that none is changed."""
        return self.js(SEEN, selector)

    def js(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def markdown(self, body: str, *texts: Any) -> Any:
        """What a script says that has the page's ``markdown``, the texts and ``done``."""
        page = "import('/static/markdown.js').then(({ markdown }) => {" + body + "});"
        script = "const texts = [...arguments], done = texts.pop();" + page
        return self.browser.execute_async_script(script, *texts)

    def press(self, text: str, within: str = "body") -> None:
        """Presses the last button with this text."""
        found = [each for each in self.all(f"{within} button") if each.text == text]
        found[-1].click()

    def begin(self, text: str, *answer: Item) -> None:
        """Sends a message and waits for the first words of the answer."""
        self.server.answers.append(answer)
        self.type(text)
        wait_for(lambda: self.texts(".text")[-1:] == [str(answer[0]).strip()])

    def send(self, text: str, *answer: Item) -> None:
        """Sends a message and waits for the end of the answer."""
        self.server.answers.append(answer or ("An answer.",))
        self.type(text)
        self.wait_whole()

    def type(self, text: str) -> None:
        self.browser.find_element("id", "prompt").send_keys(text + "\ue007")

    def wait_whole(self) -> None:
        wait_for(lambda: self.js(
            "return document.getElementById('log').ariaBusy === 'false'"
            "&& document.querySelector('.message .actions:not([hidden])')"
        ))  # fmt: skip
