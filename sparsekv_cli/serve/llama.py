"""llama-server's routes about tokens and the model."""

from __future__ import annotations

from typing import Any

from sparsekv_cli import __version__
from sparsekv_cli.generation.conversation import token_text
from sparsekv_cli.serve.forms.schema import DetokenizeFields, TokenizeFields
from sparsekv_cli.serve.requests import RequestError, Service


def tokenize(service: Service, fields: TokenizeFields) -> dict[str, Any]:
    """Returns the tokens of a text, with their texts if that is asked."""
    ids = service.tokenizer.encode(
        fields.content,
        add_bos=None if fields.add_special else False,
        parse_special=fields.parse_special,
    )
    if not fields.with_pieces:
        return {"tokens": ids}
    return {"tokens": [{"id": i, "piece": _piece(service.tokenizer.token_bytes(i))} for i in ids]}


def _piece(data: bytes) -> str | list[int]:
    """Returns a token's text; the bytes of a part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def detokenize(service: Service, fields: DetokenizeFields) -> dict[str, str]:
    """Returns the text of tokens, control tokens with it."""
    n_vocab = service.tokenizer.n_vocab
    for i, token in enumerate(fields.tokens):
        if token >= n_vocab:
            raise RequestError(
                f"tokens[{i}] = {token}: expected at most {n_vocab - 1}, since the vocabulary has "
                f"{n_vocab} tokens",
                param=f"tokens[{i}]",
            )
    return {"content": service.tokenizer.decode(fields.tokens)}


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
