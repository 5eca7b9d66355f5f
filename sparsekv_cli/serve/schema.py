"""The OpenAPI page: what the server takes and gives, for tools that read that."""

from __future__ import annotations

from typing import Any

from sparsekv_cli import __version__
from sparsekv_cli.methods import METHODS
from sparsekv_cli.serve.requests import (
    MAX_BINS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STOPS,
    Service,
)

TEXT, FLAG, OBJECT = {"type": "string"}, {"type": "boolean"}, {"type": "object"}
TEXTS = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MAX_STOPS},
    ]
}
POSITIVE = {"type": "integer", "minimum": 1, "maximum": 2**31}
STATUSES = {400: "not answered", 401: "no key", 413: "too large", 415: "not JSON", 421: "not local"}
STATUSES |= {422: "not answered", 429: "queue is full", 500: "failed", 503: "ending", 504: "time"}


def openapi(service: Service) -> dict[str, Any]:
    """The page."""
    ours = _ours()
    chat = {**ours, **_openai(), "messages": _list(OBJECT, 1), "tools": _list(OBJECT)}
    chat |= {"max_tokens": POSITIVE, "max_completion_tokens": POSITIVE, "logprobs": FLAG}
    chat |= {"top_logprobs": _whole(0, MAX_LOGPROBS), "response_format": OBJECT}
    chat |= {"continue_final_message": FLAG, "add_generation_prompt": FLAG}
    chat["tool_choice"] = {"anyOf": [TEXT, OBJECT]}
    completion = {**ours, **_openai(), "prompt": {"type": "string", "minLength": 1}}
    completion |= {"max_tokens": _whole(0, 2**31), "logprobs": _whole(0, MAX_LOGPROBS)}
    message = {**ours, "messages": _list(OBJECT, 1), "max_tokens": POSITIVE, "system": TEXT}
    message |= {"stream": FLAG, "stop_sequences": TEXTS, "tools": _list(OBJECT), "model": TEXT}
    message["tool_choice"] = OBJECT
    counted = {"messages": _list(OBJECT, 1), "system": TEXT, "tools": _list(OBJECT)}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"sparsekv-cli serve: {service.name}", "version": __version__},
        "paths": {
            "/v1/chat/completions": _post("A chat completion (OpenAI)", chat, ["messages"]),
            "/v1/completions": _post("A completion (OpenAI)", completion, ["prompt"]),
            "/v1/messages": _post("A message (Anthropic)", message, ["messages", "max_tokens"]),
            "/v1/messages/count_tokens": _post("Tokens of a prompt", counted, ["messages"]),
            "/v1/models": _get("The model"),
            "/v1/methods": _get("KV-cache methods and their options"),
            "/health": _get("Whether the server works"),
        },
    }


def _ours() -> dict[str, Any]:
    """Fields that all protocols have here."""
    return {
        "method": {"type": "string", "enum": list(METHODS)},
        "method_options": OBJECT,
        "budget": {"type": ["string", "integer"]},
        "sparse_from": {"type": "integer", "minimum": 0},
        "sparsekv_rows": _whole(0, MAX_BINS),
        "temperature": {"type": "number"},
        "top_p": {"type": "number", "minimum": 0, "maximum": 1},
        "top_k": {"type": "integer", "minimum": 0},
        "grammar": TEXT,
        "regex": TEXT,
        "think_budget": {"type": "integer", "minimum": 0},
    }


def _openai() -> dict[str, Any]:
    return {
        "model": TEXT,
        "stream": FLAG,
        "stream_options": OBJECT,
        "stop": TEXTS,
        "n": _whole(1, MAX_CHOICES),
        "seed": {"type": "integer"},
        "presence_penalty": {"type": "number"},
        "frequency_penalty": {"type": "number"},
        "logit_bias": OBJECT,
    }


def _whole(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


def _list(items: dict[str, Any], least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least}


def _responses() -> dict[str, Any]:
    failures = {str(status): {"description": text} for status, text in STATUSES.items()}
    return {"200": {"description": "the answer"}, **failures}


def _get(text: str) -> dict[str, Any]:
    return {"get": {"summary": text, "responses": _responses()}}


def _post(text: str, fields: dict[str, Any], required: list[str]) -> dict[str, Any]:
    schema = {"type": "object", "properties": fields, "required": required}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"post": {"summary": text, "requestBody": body, "responses": _responses()}}
