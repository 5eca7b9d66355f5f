"""BPE tokenizers that use the tokenizers library.

Byte-level BPE has ``tokenizer.ggml.model = "gpt2"``. Gemma 4's BPE (``gemma4``) merges characters
and encodes unknown text as bytes.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers
from tokenizers import models as tokenizer_models
from tokenizers import pre_tokenizers

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.gguf.header import show
from sparsekv_cli.models.tokenizer.pre import PreTokenizer
from sparsekv_cli.models.tokenizer.vocab import (
    PREFIX,
    SPACE_MARK,
    Vocabulary,
    check_all_bytes,
    string_list,
)

LINES = re.compile(r"[^\n]+|\n+")
MISSING_BYTE = "\0missing byte"  # token of bytes that have no token; it is left out of the ids


def byte_symbols() -> list[str]:
    """Returns GPT-2's symbol for each byte: the character itself if printable, else from U+0100."""
    symbols, n_moved = [], 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(0x100 + n_moved))
            n_moved += 1
    return symbols


def make_bpe_encoder(
    metadata: Mapping[str, Any], vocabulary: Vocabulary, pre: PreTokenizer
) -> Callable[[str], list[int]]:
    """Returns an encoder of plain text. Raises SparseKVError for missing or malformed merges."""
    ids = vocabulary.ids
    n_tokens = len(ids)
    unknown = None
    if not all(symbol in ids for symbol in byte_symbols()):
        # llama.cpp drops such a byte, but its neighbours do not become adjacent
        ids, unknown = {**ids, MISSING_BYTE: n_tokens}, MISSING_BYTE
    model = bpe_of(metadata, ids, unk_token=unknown, ignore_merges=pre.ignore_merges)
    splits = [
        pre_tokenizers.Split(tokenizers.Regex(regex), behavior="isolated")
        for regex in pre.oniguruma()
    ]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pipeline = tokenizers.Tokenizer(model)
    pipeline.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])

    def encode(text: str) -> list[int]:
        found = pipeline.encode(text, add_special_tokens=False).ids
        return found if unknown is None else [i for i in found if i != n_tokens]

    return encode


def make_line_encoder(
    metadata: Mapping[str, Any], vocabulary: Vocabulary
) -> Callable[[str], list[int]]:
    """Returns Gemma 4's encoder of plain text. It encodes lines and runs of newlines separately.

    Raises SparseKVError for missing or malformed merges or byte tokens.
    """
    check_all_bytes(vocabulary)
    ids = vocabulary.ids
    merge = tokenizers.Tokenizer(bpe_of(metadata, ids, byte_fallback=True))

    def encode(text: str) -> list[int]:
        found: list[int] = []
        for piece in LINES.findall(text.replace(" ", SPACE_MARK)):
            if piece[0] == "\n" and piece in ids:  # no merge makes these tokens
                found.append(ids[piece])
            else:
                found += merge.encode(piece, add_special_tokens=False).ids
        return found

    return encode


def bpe_of(metadata: Mapping[str, Any], ids: dict[str, int], **options: Any) -> Any:
    """Returns the library's BPE with the file's merge rules. options: the BPE's other arguments.

    The two parts of a rule and their join must be tokens. The library checks that in a fraction of
    Python's time. Raises SparseKVError for a rule that it refuses.
    """
    merges = string_list(metadata, "merges")
    if len(set(merges)) != len(merges):
        merges = list(dict.fromkeys(merges))  # llama.cpp keeps the first rank
    pairs = [(left, right) for left, _, right in [merge.partition(" ") for merge in merges]]
    try:
        return tokenizer_models.BPE(vocab=ids, merges=pairs, **options)
    except Exception:
        for merge, (left, right) in zip(merges, pairs, strict=True):
            if not ids.keys() >= {left, right, left + right}:
                raise malformed_merge(merge, ids) from None
        raise


def malformed_merge(merge: str, ids: Mapping[str, int]) -> SparseKVError:
    """Returns the error for a malformed merge rule."""
    left, _, right = merge.partition(" ")
    if not left or not right:
        reason = "two tokens with a space between them were expected"
    else:
        absent = next(text for text in (left, right, left + right) if text not in ids)
        reason = f"{show(absent)} is not in the vocabulary"
    return SparseKVError(f"{PREFIX}merges: malformed merge {show(merge)}: {reason}")
