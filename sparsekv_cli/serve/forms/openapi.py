"""The OpenAPI page, which is made of the fields of requests."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from sparsekv_cli import __version__
from sparsekv_cli.generation.fields import Fields
from sparsekv_cli.serve.forms.response_fields import ResponseFields
from sparsekv_cli.serve.forms.schema import (
    ChatFields,
    CompletionFields,
    CountFields,
    DetokenizeFields,
    InfillFields,
    MessageFields,
    TokenizeFields,
)

MAX_NAME = 255  # characters of a document's name
STATUSES = {400: "not answered", 401: "no key", 408: "too slow", 413: "too large"}
STATUSES |= {
    404: "not here",
    409: "there is one",
    415: "another content type",
    421: "not local",
    422: "not answered",
    429: "queue is full",
}
STATUSES |= {500: "failed", 503: "busy or ending", 504: "time"}
ANSWER = {"type": "string", "pattern": "^[0-9a-f]{32}$"}
TEXT = {"type": "string", "minLength": 1}
NAME, BYTES = {"type": "string", "maxLength": MAX_NAME}, "application/octet-stream"
PATHS: tuple[tuple[str, str, type[Fields]], ...] = (
    ("/v1/chat/completions", "A chat completion (OpenAI)", ChatFields),
    ("/v1/completions", "A completion (OpenAI)", CompletionFields),
    ("/v1/messages", "A message (Anthropic)", MessageFields),
    ("/v1/messages/count_tokens", "Tokens of a prompt", CountFields),
    ("/v1/responses", "A response (OpenAI)", ResponseFields),
    ("/tokenize", "Tokens of a text (llama-server)", TokenizeFields),
    ("/detokenize", "The text of tokens (llama-server)", DetokenizeFields),
    ("/infill", "The text in a gap (llama-server)", InfillFields),
)


def openapi(name: str) -> dict[str, Any]:
    """Returns the page. name: the model's name."""
    schemas, shared = models_json_schema(
        [(model, "validation") for _, _, model in PATHS],
        ref_template="#/components/schemas/{model}",
    )
    chat = schemas[ChatFields, "validation"]
    posts = {path: _post(text, schemas[model, "validation"]) for path, text, model in PATHS}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"sparsekv-cli serve: {name}", "version": __version__},
        "components": {"schemas": shared["$defs"]},
        "paths": {
            **posts,
            "/v1/responses/{id}": {
                "parameters": [{"name": "id", "in": "path", "required": True, "schema": TEXT}],
                "get": _action("A response that is kept"),
                "delete": _action("Keeps a response no more"),
            },
            "/v1/answers/{id}": {
                "parameters": [{"name": "id", "in": "path", "required": True, "schema": ANSWER}],
                "put": _post("A chat completion that goes on without its client", chat)["post"],
                "get": _action("The events of a kept answer, from the first one on"),
                "delete": _action("Ends an answer"),
            },
            "/documents": {
                "parameters": [{"name": "name", "in": "query", "schema": NAME}],
                "post": _action(
                    "The text of a PDF or a Word file",
                    requestBody=_body(BYTES, {"type": "string", "format": "binary"}),
                ),
            },
            "/v1/models": _get("The models"),
            "/v1/methods": _get("KV-cache methods and their options"),
            "/props": _get("The model and its defaults (llama-server)"),
            "/health": _get("Whether the server works"),
        },
    }


def _action(text: str, **more: Any) -> dict[str, Any]:
    failures = {str(status): {"description": text} for status, text in STATUSES.items()}
    responses = {"200": {"description": "the answer"}, **failures}
    return {"summary": text, **more, "responses": responses}


def _get(text: str) -> dict[str, Any]:
    return {"get": _action(text)}


def _post(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"post": _action(text, requestBody=_body("application/json", schema))}


def _body(kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {kind: {"schema": schema}}}
