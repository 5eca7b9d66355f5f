"""A server that answers with what a test says, and what a person does with the page."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from waiting import wait_for

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.serve import page
from sparsekv_cli.serve.wire.documents import Documents
from sparsekv_cli.serve.wire.kept import KeptAnswers, KeptError

METHODS = ("full", "lfps", "topk", "fasa")
PARAMS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.0}
SWITCH = "enable_thinking"
Item = str | tuple[str, Any]
GATE, CUT = ("gate", None), ("cut", None)
CUT_HERE = ": cut\n\n"


class Scripted:
    """A server with the page. answers: of the next requests; asked: what they were.

    An item of an answer is a text, ("think", text), ("rows", rows), ("comment", text),
    ("model", name), ("progress", (done, total)), GATE, at which the server waits for go(), or CUT,
    which ends the connection. An answer may be (status, message) instead. forgets: whether no
    answer is found again. writes: how many are being written. gated: documents that are read after
    go(); left: whether one's client has gone. slow: the seconds that it takes to describe a thing.
    """

    def __init__(self) -> None:
        self.url = ""
        self.answers: list[Sequence[Item] | tuple[int, str]] = []
        self.asked: list[dict[str, Any]] = []
        self.models = [self.model("tiny")]
        self.key, self.n_open, self.slow, self.method = "", 0, 0.0, "full"
        self.gated: set[str] = set()
        self.forgets, self.cuts, self.writes = False, 0, 0
        failure = lambda error: f"event: error\ndata: {failed(error)}\n\n"  # noqa: E731
        self.kept = KeptAnswers(failure)
        self.left = 0
        self.visitor = object()  # of a test; answers to an earlier one end

    def go(self) -> None:
        """Lets an answer go on after a gate."""
        self.n_open += 1

    def app(self) -> Starlette:
        described = [Route(path, self.describe) for path in ("/v1/methods", "/v1/models", "/props")]
        answers = Route("/v1/answers/{id}", self.answer, methods=["PUT", "GET", "DELETE"])
        documents = Route("/documents", self.read, methods=["POST"])
        return Starlette(routes=[*page.routes(), *described, answers, documents])

    @staticmethod
    def model(name: str, methods: Sequence[str] = METHODS[:3]) -> dict[str, Any]:
        about = {"context_length": 1024, "methods": list(methods), "thinking_switch": SWITCH}
        depths = {each: 7680 * (each == "lfps") for each in methods}
        return {"id": name, "status": "loaded", "sparse_from": depths, **about}

    async def describe(self, request: Request) -> Response:
        await asyncio.sleep(self.slow)
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "the API key is missing or wrong"}}, 401)
        options = [{"name": "budget", "default": "5%"}]
        use = {"use": "some texts", "options": options}
        methods = [{"name": name, "summary": f"what {name} does", **use} for name in METHODS]
        params = {**PARAMS, "seed": -1, "n_predict": 256}
        known = {
            "/v1/methods": {"default": self.method, "methods": methods},
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

    async def answer(self, request: Request) -> Response:
        """Keeps answers as the server does."""
        name, gone = request.path_params["id"], KeptError("no answer is kept", 404, "")
        try:
            if request.method == "DELETE":
                self.kept.remove(name)
                return JSONResponse({})
            if request.method == "PUT":
                self.asked.append(await request.json())
                answer = self.answers.pop(0)
                if isinstance(answer[0], int):
                    return JSONResponse({"error": {"message": answer[1]}}, answer[0])
                self.kept.begin(name).start(self.events(answer))
            elif self.forgets:
                raise gone
            events = self.kept.find(name).read()
            return StreamingResponse(self.cut(events), media_type="text/event-stream")
        except KeptError as error:
            return JSONResponse({"error": {"message": str(error)}}, error.status)

    async def cut(self, events: AsyncIterator[str]) -> AsyncIterator[str]:
        """Ends the connection at a mark, the first time."""
        async for text in events:
            if text != CUT_HERE:
                yield text
            elif self.cuts:
                self.cuts -= 1
                return

    async def events(self, items: Sequence[Any]) -> AsyncGenerator[str]:
        self.writes += 1
        try:
            async for text in self.texts(items):
                yield text
        finally:
            self.writes -= 1

    async def texts(self, items: Sequence[Any]) -> AsyncIterator[str]:
        visitor = self.visitor
        for item in items:
            kind, value = item if isinstance(item, tuple) else ("text", item)
            if kind == "gate":
                while not self.n_open:
                    await asyncio.sleep(0.01)
                    if visitor is not self.visitor:
                        return
                self.n_open -= 1
            elif kind == "cut":
                self.cuts += 1
                yield CUT_HERE
            elif kind == "comment":
                yield f": {value}\n\n"
            elif kind == "progress":
                progress = {"processed": value[0], "total": value[1]}
                yield f"data: {json.dumps({'choices': [], 'prompt_progress': progress})}\n\n"
            elif kind == "model":
                yield f"data: {json.dumps({'choices': [], 'model': value})}\n\n"
            elif kind == "rows":
                rows = {"rows": value, "tokens": 1, "accepted": 0}
                yield f"event: sparsekv.rows\ndata: {json.dumps(rows)}\n\n"
            else:
                delta = {"content" if kind == "text" else "reasoning_content": value}
                yield f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n"
        yield f"data: {json.dumps(LAST)}\n\ndata: [DONE]\n\n"


def failed(error: Any) -> str:
    return json.dumps({"error": {"message": str(error), "code": error.code}})


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
        page = "import('/static/text/markdown.js').then(({ markdown }) => {" + body + "});"
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
