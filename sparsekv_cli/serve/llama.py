"""llama-server's routes: tokens, the model, and the text in a gap."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from sparsekv_cli import __version__
from sparsekv_cli.generation.answer import STOP_LENGTH, STOP_TEXT
from sparsekv_cli.generation.conversation import token_text
from sparsekv_cli.models.chat.calls import Part, Text, Thought
from sparsekv_cli.serve.answers import News, Ping
from sparsekv_cli.serve.forms.schema import DetokenizeFields, InfillFields, TokenizeFields
from sparsekv_cli.serve.jobs import Finished
from sparsekv_cli.serve.openai import Completion, comment, event, rows_event
from sparsekv_cli.serve.requests import RequestError, Service


def tokenize(service: Service, fields: TokenizeFields) -> dict[str, Any]:
    """Returns the tokens of a text, with their own texts if the request asks for them."""
    ids = service.tokenizer.encode(
        fields.content,
        add_bos=None if fields.add_special else False,
        parse_special=fields.parse_special,
    )
    if not fields.with_pieces:
        return {"tokens": ids}
    return {"tokens": [{"id": i, "piece": _piece(service.tokenizer.token_bytes(i))} for i in ids]}


def _piece(data: bytes) -> str | list[int]:
    """Returns a token's text, or its bytes if it is a part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def detokenize(service: Service, fields: DetokenizeFields) -> dict[str, str]:
    """Returns the text of tokens, control tokens included."""
    n_vocab = service.tokenizer.n_vocab
    for i, token in enumerate(fields.tokens):
        if token >= n_vocab:
            raise RequestError(
                f"tokens[{i}] = {token}: expected at most {n_vocab - 1}, since the vocabulary has "
                f"{n_vocab} tokens",
                param=f"tokens[{i}]",
            )
    return {"content": service.tokenizer.decode(fields.tokens)}


class Infill:
    """One request of /infill; ``stream`` or ``whole`` answers it."""

    def __init__(self, service: Service, fields: InfillFields) -> None:
        """Raises RequestError for a request that cannot be answered."""
        self.streams, self._name = fields.stream, service.name
        files = [(each.filename, each.text) for each in fields.input_extra]
        ids = service.gap_ids(fields.input_prefix, fields.input_suffix, files, fields.prompt)
        self._completion = Completion(service, fields.as_completion(ids))

    async def whole(self) -> dict[str, Any]:
        """Returns the response to a request that does not stream."""
        async with self._completion.answers() as answers:
            (news,) = await answers.whole()
        assert news.end is not None
        return self._ended(_text(news.parts), news.end)

    async def stream(self) -> AsyncIterator[str]:
        """Yields the events of a response that streams."""
        async with self._completion.answers() as answers:
            yield comment(Ping())
            async for news in answers.parts():
                if not isinstance(news, News):
                    yield comment(news)
                    continue
                if news.rows is not None:
                    yield rows_event(news)
                text = _text(news.parts)
                if text and news.end is None:
                    yield event({"index": 0, "content": text, "stop": False})
                elif news.end is not None:
                    yield event(self._ended(text, news.end))

    def failure(self, error: Mapping[str, Any]) -> str:
        """Returns the last event of a stream that fails."""
        return event(error, "error")

    def _ended(self, text: str, end: Finished) -> dict[str, Any]:
        kinds = {STOP_LENGTH: "limit", STOP_TEXT: "word"}
        return {
            "index": 0,
            "content": text,
            "stop": True,
            "stop_type": kinds.get(end.stop_reason, "eos"),
            "stopping_word": end.stopped_by,
            "model": self._name,
            "tokens_evaluated": end.n_prompt,
            "tokens_cached": end.n_cached,
            "tokens_predicted": end.n_generated,
            "truncated": False,
            "sparsekv": self._completion.about({0: end}),
        }


def _text(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Text | Thought))


def props(service: Service) -> dict[str, Any]:
    """Returns the model and its defaults."""
    model, tokenizer = service.model, service.tokenizer
    return {
        "default_generation_settings": {"n_ctx": model.n_ctx, "params": service.defaults()},
        "total_slots": service.scheduler.n_parallel,
        "model_alias": service.name,
        "model_path": str(model.gguf.path),
        "chat_template": service.template or "",
        "modalities": {"vision": False, "audio": False},
        "bos_token": token_text(tokenizer, tokenizer.bos_id),
        "eos_token": token_text(tokenizer, tokenizer.eos_id),
        "build_info": f"sparsekv-cli {__version__}",
        "is_sleeping": False,
    }
