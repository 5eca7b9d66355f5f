"""Fuzz targets of what clients write: templates, lines, requests."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from pathlib import Path

from kept_targets import opened
from mutation import TEXTS, FoundError, changed_json, packed_json

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>"
    "{% endfor %}{% if enable_thinking is false %}<think></think>{% endif %}"
)
SHAPE = {"n_ctx": 192, "chat_template": TOOLS}
N_TOKENS = 4  # of an answer
VARYING = r"\d+|'[^']*'|[0-9a-f]{8,}"
HI = [{"role": "user", "content": "Hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}


class Templates:
    """A chat template and a conversation: JSON."""

    WORDS = (
        *("{{", "}}", "{%", "%}", "{% for x in range(10**9) %}", "{% endfor %}", "{% if x %}"),
        *("{% set x = [1] %}", "{% set ns = namespace(a=1) %}", "{% macro f(a) %}"),
        *("{% endmacro %}", "{{ 'a' * 1000000 }}", "{{ x | tojson }}"),
        *("{{ messages[0].content[::-1] }}", "{#", "#}", "{{ raise_exception('no') }}"),
        *("{{ strftime_now('%Y') }}", "| list", "| map('upper')", "{{ ''.__class__ }}"),
        *("{{ cycler.__init__ }}", "~", ".items()", "| sort", "{% break %}", "{{ 9 ** 9 ** 9 }}"),
        *("{{ x | join(',') }}", "{{ '%s' | format(x) }}", "{% generation %}", "{{ f(f) }}"),
        *("{% call f() %}", "| batch(3)", "is defined", "loop.index0", "{{ 1 // 0 }}"),
        *("{{ messages | groupby('role') }}", "{{ messages | tojson(indent=99999) }}", "-%}"),
        "{%-",
        *TEXTS,
    )

    @classmethod
    def change(cls, rng: random.Random, case: bytes) -> bytes:
        return changed_json(rng, case, cls.WORDS)

    def __init__(self, folder: Path) -> None:
        pass

    def seeds(self) -> Iterable[bytes]:
        messages = [{"role": "system", "content": "S"}, *HI, {"role": "assistant", "content": "é"}]
        root = Path(__file__).resolve().parents[2] / "tests" / "data" / "templates"
        known = [path.read_text("utf-8") for path in sorted(root.glob("*.jinja"))]
        for template in (CHATML, TOOLS, *known):
            yield packed_json({"template": template, "messages": messages, "tools": [TOOL]})

    def run(self, case: bytes) -> str:
        from sparsekv_cli.errors import SparseKVError
        from sparsekv_cli.generation.messages import read_messages
        from sparsekv_cli.models.chat.template import render
        from sparsekv_cli.models.chat.thinking import variables_of

        try:
            given = json.loads(case)
            template, messages, tools = given["template"], given["messages"], given["tools"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return "no case"
        if not isinstance(template, str) or not isinstance(messages, list):
            return "no case"
        try:
            messages = read_messages(messages)
        except SparseKVError:
            messages = HI
        is_list = isinstance(tools, list)
        tools = [each for each in tools if isinstance(each, dict)] if is_list else None
        variables_of(template)
        render(template, messages, tools=tools, enable_thinking=False)
        return "rendered"


class Lines:
    """Lines of ``run --jsonl``: each has one line of JSON as its answer."""

    KEYS: tuple[str, ...] = (
        *("prompt", "messages", "id", "system", "raw", "parse_special", "special", "think", "stop"),
        *("inline_thinking", "continue_final_message", "add_generation_prompt", "n_predict"),
        *("logprobs", "temperature", "top_k", "top_p", "min_p", "seed", "json_schema", "grammar"),
        *("regex", "think_budget", "repeat_penalty", "logit_bias", "samplers", "ignore_eos"),
        *("dry_multiplier", "dry_sequence_breakers", "mirostat", "typical_p", "xtc_probability"),
        *("role", "content", "tool_calls", "temp", "(a|b)*c", 'root ::= "a" root', "user", "tool"),
    )

    @classmethod
    def change(cls, rng: random.Random, case: bytes) -> bytes:
        lines = case.split(b"\n")
        at = rng.randrange(len(lines))
        lines[at] = changed_json(rng, lines[at], (*cls.KEYS, *TEXTS))
        if rng.random() < 0.2:
            lines.insert(at, rng.choice(lines))
        return b"\n".join(lines[:8])

    def __init__(self, folder: Path) -> None:
        self.model = opened(folder, **SHAPE)

    def seeds(self) -> Iterable[bytes]:
        lines = (
            {"prompt": "Hello", "id": 1, "temperature": 0.5, "seed": 1, "stop": ["x"]},
            {"messages": HI, "top_k": 3, "logprobs": 2, "think": False, "n_predict": 2},
            {"prompt": "A", "raw": True, "logit_bias": {"5": 1.5}, "ignore_eos": True},
            {"prompt": "B", "json_schema": CITY, "repeat_penalty": 1.1, "min_p": 0.1},
            {"prompt": "C", "samplers": ["top_k", "temperature"], "dry_multiplier": 0.8},
            {"messages": [*HI, {"role": "assistant", "content": "x"}], "regex": "[ab]+"},
        )
        yield b"\n".join(map(packed_json, lines))

    def run(self, case: bytes) -> str:
        from sparsekv_cli.commands.run.jsonl import LineAnswers, Output
        from sparsekv_cli.commands.run.task import Task

        written: list[str] = []
        told: list[str] = []
        lines = [line for line in case.split(b"\n") if line.strip()]
        answers = LineAnswers(self.model, 2, Output(written.append, told.append), None)
        answers.run(enumerate(lines, 1), Task(n_predict=N_TOKENS))
        found = [json.loads(line) for line in written]
        if [each["line"] for each in found] != list(range(1, len(lines) + 1)):
            raise FoundError(f"{len(lines)} lines have the answers {written}")
        errors = [each["error"] for each in found if "error" in each]
        for text in [*errors, *told]:
            if "\n" in text or ("unexpected " in text and "Error" in text):
                raise FoundError(f"no one line: {text!r}")
        return re.sub(r"\d+|'[^']*'", "#", errors[0])[:80] if errors else "answered"


class Server:
    """A request to a route of ``serve``: JSON of method, path, headers and body."""

    KEYS = (
        *Lines.KEYS,
        *("model", "max_tokens", "stream", "n", "tools", "tool_choice", "response_format", "input"),
        *("instructions", "previous_response_id", "store", "text", "format", "json_object", "echo"),
        *("suffix", "best_of", "logprobs", "top_logprobs", "stream_options", "include_usage"),
        *("method", "method_options", "budget", "lfps", "quest", "auto", "required", "function"),
        *("stop_sequences", "thinking", "budget_tokens", "enabled", "tokens", "with_pieces"),
        *("reasoning_effort", "chat_template_kwargs", "sparsekv_rows", "return_progress", "type"),
        *("image_url", "input_text", "tool_use", "tool_result", "tool_use_id", "call_id", "strict"),
        *("GET", "POST", "DELETE", "OPTIONS", "/v1/responses/x", "/v1/models/x", "text/plain"),
        *("content-length", "transfer-encoding", "authorization", "host", "content-type", "gzip"),
    )

    @classmethod
    def change(cls, rng: random.Random, case: bytes) -> bytes:
        return changed_json(rng, case, (*cls.KEYS, *TEXTS))

    def __init__(self, folder: Path) -> None:
        from starlette.testclient import TestClient

        from sparsekv_cli.generation.sampler import SamplingOptions
        from sparsekv_cli.serve.app import Access, make_app
        from sparsekv_cli.serve.pool import HostedModel, ModelPool
        from sparsekv_cli.serve.requests import RequestLimits, Service
        from sparsekv_cli.serve.scheduler import Scheduler

        model = opened(folder, **SHAPE)
        scheduler = Scheduler(model, n_parallel=2, n_queue=4, kv_bytes=1 << 26)
        scheduler.start()
        limits = RequestLimits(N_TOKENS, 60.0, 1 << 18)
        self.service = Service(model, scheduler, limits, {}, SamplingOptions({"temp": 0.0}))
        hosted = HostedModel(("m",), model.gguf.path)
        pool = ModelPool([hosted], lambda _: self.service, 0, limits, "full", lambda line: None)
        pool.load_first()
        app = make_app(pool, Access(only_local=False))
        self.client = TestClient(app, raise_server_exceptions=False, follow_redirects=False)

    def seeds(self) -> Iterable[bytes]:
        chat = {"messages": HI, "max_tokens": 2}
        ask = {"messages": HI, "max_tokens": 2, "model": "m"}
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "A"}]}
        function = {"name": "weather", "arguments": "{}"}
        called = [{"id": "1", "type": "function", "function": function}]
        history = [*HI, {"role": "assistant", "content": None, "tool_calls": called}]
        history.append({"role": "tool", "tool_call_id": "1", "content": "sun"})
        schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY}}
        usage, two = {"include_usage": True}, {"prompt": ["A", "B"], "max_tokens": 2}
        posts = (
            ("/v1/chat/completions", {**chat, "stream": True, "stream_options": usage}),
            ("/v1/chat/completions", {**chat, "tools": [TOOL], "tool_choice": "auto"}),
            ("/v1/chat/completions", {**chat, "messages": history, "logprobs": True, "n": 2}),
            ("/v1/chat/completions", {**chat, "response_format": schema, "method": "lfps"}),
            ("/v1/completions", {**two, "echo": True, "logprobs": 1}),
            ("/v1/completions", {"prompt": [5, 6], "max_tokens": 2, "stop": ["a"], "best_of": 2}),
            ("/v1/messages", {**ask, "system": "S", "stream": True, "stop_sequences": ["x"]}),
            ("/v1/messages", {**ask, "thinking": {"type": "enabled", "budget_tokens": 1024}}),
            ("/v1/messages/count_tokens", {"messages": HI, "model": "m"}),
            ("/v1/responses", {"input": [item], "max_output_tokens": 2, "store": True}),
            ("/v1/responses", {"input": "A", "stream": True, "instructions": "B"}),
            ("/tokenize", {"content": "a b", "add_special": True, "with_pieces": True}),
            ("/detokenize", {"tokens": [5, 6, 7]}),
        )
        for path, body in posts:
            yield packed_json({"method": "POST", "path": path, "headers": {}, "body": body})
        for path in ("/v1/models", "/v1/methods", "/props", "/health", "/metrics", "/openapi.json"):
            yield packed_json({"method": "GET", "path": path, "headers": {"x": "y"}, "body": None})
        yield packed_json(
            {"method": "POST", "path": "/tokenize", "headers": {"content-type": "a"}, "body": "raw"}
        )

    def run(self, case: bytes) -> str:
        try:
            given = json.loads(case)
            method, path, headers = given["method"], given["path"], given["headers"]
            body = given["body"]
            content = body.encode() if isinstance(body, str) else packed_json(body)
            headers = {"content-type": "application/json", **headers}
            url = f"http://localhost/{path.lstrip('/')}"
            request = self.client.build_request(method, url, headers=headers, content=content)
        except Exception:  # no client can send it
            return "no request"
        answer = self.client.send(request)
        text = answer.text
        if answer.status_code >= 500 and answer.status_code not in (501, 503):
            raise FoundError(f"status {answer.status_code}: {text[:2000]}")
        if ("unexpected " in text and "Error" in text) or self.service.scheduler.failure:
            raise FoundError(f"status {answer.status_code}: {text[:2000]}")
        if answer.status_code == 400 and "\n" in json.loads(text)["error"]["message"]:
            raise FoundError(f"no one line: {text[:2000]}")
        return f"{path[:30]} {answer.status_code} {re.sub(VARYING, '#', text)[:80]}"
