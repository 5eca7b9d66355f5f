"""Metadata of tiny tokenizers: byte-level BPE and SentencePiece."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from sparsekv_cli.models.tokenizer.bpe import byte_symbols
from sparsekv_cli.models.tokenizer.tokenizer import Tokenizer, load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def bpe_metadata(**changes: Any) -> dict[str, Any]:
    """256 bytes, then he, ll, hell, hello, " hello", 12 and special tokens."""
    tokens = [*byte_symbols(), "he", "ll", "hell", "hello", "Ġhello", "12"]
    types = [NORMAL] * len(tokens)
    tokens += ["<|im_start|>", "<|im_end|>", "<tool>", "<tool>>", "spare"]
    types += [CONTROL, CONTROL, USER_DEFINED, USER_DEFINED, UNUSED]
    metadata = {
        "general.name": "tiny",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2"],
        "tokenizer.ggml.bos_token_id": 262,
        "tokenizer.ggml.eos_token_id": 263,
    }
    return changed(metadata, changes)


def bpe_with(kinds: Mapping[str, int], merges: Iterable[str] = ()) -> Tokenizer:
    """The tokenizer of ``bpe_metadata`` with more tokens. kinds: by their texts."""
    metadata = bpe_metadata()
    types = [*metadata["tokenizer.ggml.token_type"], *kinds.values()]
    metadata["tokenizer.ggml.tokens"] += kinds
    metadata["tokenizer.ggml.token_type"] = np.array(types, np.int32)
    metadata["tokenizer.ggml.merges"] += merges
    return load_tokenizer(metadata)


def spm_metadata(**changes: Any) -> dict[str, Any]:
    """<unk>, <s>, </s>, 256 bytes, then pieces with scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    scores = [0.0] * len(tokens)
    pieces = {"▁": -9, "a": -8, "b": -7, "ab": -2, "▁a": -3, "ba": -1, "▁▁": -4, "bab": -5}
    tokens += [*pieces, "<user>"]
    types += [NORMAL] * len(pieces) + [USER_DEFINED]
    scores += [*pieces.values(), 0.0]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.scores": np.array(scores, np.float32),
    }
    return changed(metadata, changes)


def changed(metadata: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """With ``changes`` to tokenizer.ggml.*; None takes a key away, ``__`` stands for a dot."""
    for name, value in changes.items():
        key = name.replace("__", ".") if "__" in name else f"tokenizer.ggml.{name}"
        metadata.pop(key, None)
        if value is not None:
            metadata[key] = value
    return metadata
