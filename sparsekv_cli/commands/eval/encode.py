"""How ``eval ruler`` asks a model: a message's ids, and the beginning of the answer to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsekv_cli.generation.conversation import chat_template, encode_messages, messages_of

if TYPE_CHECKING:
    from sparsekv_cli.evaluation.ruler.samples import Encode
    from sparsekv_cli.session import Session


def encoder(session: Session, raw: bool) -> Encode:
    """The ids of a message in the model's chat template, if it has one, and the answer's start."""
    template = None if raw else chat_template(session.gguf.metadata)
    tokenizer = session.tokenizer

    def encode(text: str, answer: str) -> list[int]:
        if template is None:
            return tokenizer.encode(f"{text}\n{answer}", add_eos=False, parse_special=False)
        ids = encode_messages(tokenizer, template, messages_of(None, text))
        return ids + tokenizer.encode(answer, add_bos=False, parse_special=False)

    return encode
