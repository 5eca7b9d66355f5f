"""Encodes the prompts of ``eval ruler``: a message, and the beginning of its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsekv_cli.generation.conversation import chat_template, encode_messages, messages_of

if TYPE_CHECKING:
    from sparsekv_cli.evaluation.ruler.samples import Encode
    from sparsekv_cli.model import Model


def encoder(model: Model, raw: bool) -> Encode:
    """Returns a function: message, start of the answer -> ids, in the chat template if any."""
    template = None if raw else chat_template(model.gguf.metadata)
    tokenizer = model.tokenizer

    def encode(text: str, answer: str) -> list[int]:
        if template is None:
            return tokenizer.encode(f"{text}\n{answer}", add_eos=False, parse_special=False)
        ids = encode_messages(tokenizer, template, messages_of(None, text))
        return ids + tokenizer.encode(answer, add_bos=False, parse_special=False)

    return encode
