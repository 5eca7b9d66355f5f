"""Reads and checks the vocabulary of a GGUF file: texts of tokens, their kinds, special ids.

Source: llama.cpp's llama-vocab.cpp (``llama_vocab::impl::load``). A token's kind is a set of bits.
A token whose text is known to end an answer is also a control token, whatever the file says.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.gguf.file import StringArray
from sparsekv_cli.models.gguf.header import show

PREFIX = "tokenizer.ggml."
SPACE_MARK = "\u2581"  # stands for a space in tokens of SentencePiece and Gemma 4

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 4, 8, 16, 32
KIND_OF_TYPE = (0, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE)  # by token_type
SPECIAL = UNKNOWN | CONTROL

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")

EOT_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
    *("<EOT>", "_<EOT>", "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>"),
)
EOM_TEXTS = ("<|eom_id|>",)
FIM_PAD_TEXTS = ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")
FIM_REPOSITORY_TEXTS = ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")
FIM_SEPARATOR_TEXTS = ("<|file_sep|>",)
FIM_PREFIX_TEXTS = (  # prefix, suffix and middle are control tokens that do not end a generation
    *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
    *("<|code_prefix|>", "<|prefix|>"),
)
FIM_SUFFIX_TEXTS = (
    *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
    *("<|code_suffix|>", "<|suffix|>"),
)
FIM_MIDDLE_TEXTS = (
    *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
    *("<|code_middle|>", "<|middle|>"),
)
INFILL_MARKS = ("prefix", "suffix", "middle", "repository", "file")
FIM_OTHERS = (  # old key, key, texts
    ("prefix_token_id", "fim_pre_token_id", FIM_PREFIX_TEXTS),
    ("suffix_token_id", "fim_suf_token_id", FIM_SUFFIX_TEXTS),
    ("middle_token_id", "fim_mid_token_id", FIM_MIDDLE_TEXTS),
)
EOG_TEXTS = (
    *EOT_TEXTS,
    *EOM_TEXTS,
    *("<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "</s>", "[EOS]", "<eos>", "<turn|>"),
    *("<|tool_response>", "[e~["),
)
ALWAYS_SHOWN_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # gpt-oss


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model and the ids of its special tokens."""

    model: str
    texts: list[str]  # by id
    ids: dict[str, int]  # by text
    kinds: np.ndarray  # (n,), bits
    scores: np.ndarray | None  # f32 (n,) for SentencePiece, else None
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    eom_id: int | None
    unk_id: int | None
    pad_id: int | None
    eog_ids: frozenset[int]
    infill: Mapping[str, int]  # name in INFILL_MARKS -> control token of a text with a gap


def read_vocabulary(metadata: Mapping[str, Any], model: str) -> Vocabulary:
    """Returns the vocabulary. model: the tokenizer model ``llama``, ``gpt2`` or ``gemma4``.

    Raises SparseKVError for a missing, short, mistyped, doubled or impossible value.
    """
    texts = string_list(metadata, "tokens")
    if not texts:
        raise SparseKVError(f"{PREFIX}tokens is empty: a vocabulary was expected")
    texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]  # llama.cpp's names
    ids = {text: i for i, text in enumerate(texts)}
    if len(ids) != len(texts):
        i = next(i for i, text in enumerate(texts) if ids[text] != i)
        raise SparseKVError(
            f"{PREFIX}tokens: tokens {i} and {ids[texts[i]]} are both {show(texts[i])}; "
            "a token may be there once (convert the model again)"
        )
    types = number_array(metadata, "token_type", len(texts), "iu", "whole numbers")
    known = (types >= 0) & (types < len(KIND_OF_TYPE))
    kinds = np.where(known, np.array(KIND_OF_TYPE, np.uint8)[np.where(known, types, 0)], 0)
    check_byte_tokens(texts, kinds)
    scores = None
    if model == "llama":
        scores = number_array(metadata, "scores", len(texts), "iuf", "numbers").astype(np.float32)
        if not np.isfinite(scores).all():
            i = int(np.argmin(np.isfinite(scores)))
            raise SparseKVError(f"{PREFIX}scores: token {i} has {scores[i]}: must be finite")

    def special(name: str, default: int | None = None) -> int | None:
        return special_id(metadata, name, len(texts), default)

    if model == "llama":
        defaults: tuple[int | None, int | None, int | None] = (1, 2, 0)
    elif model == "gemma4":
        defaults = (None, None, None)
    else:  # llama.cpp's default is 11 (Falcon's); used only if that is a control token
        falcon = 11 if len(texts) > 11 and kinds[11] & CONTROL else None
        no_bos = str(metadata.get(PREFIX + "pre")) in ("chatglm-bpe", "glm4", "glm5")
        defaults = (None if no_bos else falcon, falcon, None)
    bos_id, eos_id = special("bos_token_id", defaults[0]), special("eos_token_id", defaults[1])
    unk_id, pad_id = special("unknown_token_id", defaults[2]), special("padding_token_id")

    def known_by_text(name: str | None, candidates: tuple[str, ...]) -> int | None:
        """Returns the id in the file, or that of the first text in ``candidates`` that is a token.

        The second becomes a control token.
        """
        given = special(name) if name else None
        if given is not None:
            return given
        found = next((ids[text] for text in candidates if text in ids), None)
        if found is not None:
            kinds[found] |= CONTROL
        return found

    eot_id = known_by_text("eot_token_id", EOT_TEXTS)
    eom_id = known_by_text("eom_token_id", EOM_TEXTS)
    marks = []
    for old_key, key, candidates in FIM_OTHERS:
        old = special(old_key)
        marks.append(known_by_text(key, candidates) if old is None else old)
    pad_mark = known_by_text("fim_pad_token_id", FIM_PAD_TEXTS)
    marks.append(known_by_text("fim_rep_token_id", FIM_REPOSITORY_TEXTS))
    marks.append(known_by_text("fim_sep_token_id", FIM_SEPARATOR_TEXTS))
    infill = {name: i for name, i in zip(INFILL_MARKS, marks, strict=True) if i is not None}
    ending = {pad_mark, *marks[3:]}
    for text in EOG_TEXTS:
        if text in ids:
            ending.add(ids[text])
            kinds[ids[text]] |= CONTROL
    for text in ALWAYS_SHOWN_TEXTS:
        if text in ids:
            kinds[ids[text]] = USER_DEFINED
    ending |= {eos_id, eot_id, eom_id}
    eog_ids = frozenset(i for i in ending if i is not None)
    has = {text for text in EOG_TEXTS if ids.get(text) in eog_ids}
    # gpt-oss and Solar Open: <|end|> ends one message, not the answer
    calls = "<|call|>" in has or "<|calls|>" in has
    if "<|end|>" in has and calls and has & {"<|return|>", "<|flush|>"}:
        eog_ids -= {ids["<|end|>"]}
        kinds[ids["<|end|>"]] = USER_DEFINED
    if "<|tool_response>" in has and "</s>" in has:  # Gemma 4, where </s> is a text
        eog_ids -= {ids["</s>"]}
        kinds[ids["</s>"]] = NORMAL
    return Vocabulary(
        model=model,
        texts=texts,
        ids=ids,
        kinds=kinds,
        scores=scores,
        bos_id=bos_id,
        eos_id=eos_id,
        eot_id=eot_id,
        eom_id=eom_id,
        unk_id=unk_id,
        pad_id=pad_id,
        eog_ids=eog_ids,
        infill=infill,
    )


def string_list(metadata: Mapping[str, Any], name: str) -> list[str]:
    """Returns the string array ``tokenizer.ggml.<name>`` as a list."""
    value = metadata.get(PREFIX + name)
    if isinstance(value, StringArray):
        return value.tolist()
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return value
    raise SparseKVError(f"{PREFIX}{name} is {describe(value)}: an array of strings was expected")


def number_array(
    metadata: Mapping[str, Any], name: str, n_tokens: int, dtype_kinds: str, wanted: str
) -> np.ndarray:
    """Returns the first ``n_tokens`` elements of the numeric array ``tokenizer.ggml.<name>``."""
    value = metadata.get(PREFIX + name)
    if isinstance(value, list):
        value = np.array(value)
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in dtype_kinds:
        raise SparseKVError(f"{PREFIX}{name} is {describe(value)}: an array of {wanted} expected")
    if len(value) < n_tokens:
        raise SparseKVError(f"{PREFIX}{name} has {len(value)} elements for {n_tokens} tokens")
    return value[:n_tokens]


def special_id(
    metadata: Mapping[str, Any], name: str, n_tokens: int, default: int | None
) -> int | None:
    """Returns the id ``tokenizer.ggml.<name>``. If it is missing: ``default``, if it is an id."""
    value = metadata.get(PREFIX + name)
    if value is None:
        return default if default is not None and default < n_tokens else None
    if isinstance(value, bool) or not isinstance(value, int):
        raise SparseKVError(f"{PREFIX}{name} is {describe(value)}: a token id was expected")
    if not 0 <= value < n_tokens:
        raise SparseKVError(f"{PREFIX}{name} = {value}: must be a token id, 0 to {n_tokens - 1}")
    return value


def flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    """Returns the boolean ``tokenizer.ggml.<name>``; ``default`` if it is missing."""
    value = metadata.get(PREFIX + name, default)
    if not isinstance(value, bool):
        raise SparseKVError(f"{PREFIX}{name} is {describe(value)}: true or false was expected")
    return value


def check_all_bytes(vocabulary: Vocabulary) -> None:
    """Raises SparseKVError if one of the 256 byte tokens is missing.

    Text outside the vocabulary is encoded as bytes.
    """
    for byte in range(256):
        if f"<0x{byte:02X}>" not in vocabulary.ids:
            raise SparseKVError(
                f"{PREFIX}tokens has no byte token <0x{byte:02X}>: such a vocabulary needs all 256 "
                "(convert the model again)"
            )


def check_byte_tokens(texts: list[str], kinds: np.ndarray) -> None:
    """Raises SparseKVError if a byte token has another text than ``<0x00>`` to ``<0xFF>``."""
    for i in np.flatnonzero(kinds == BYTE).tolist():
        if not BYTE_TOKEN.fullmatch(texts[i]):
            raise SparseKVError(
                f"{PREFIX}tokens: token {i} is a byte token spelled {show(texts[i])}: "
                "<0x00> to <0xFF> was expected"
            )


def describe(value: Any) -> str:
    """Returns a short description of a metadata value for an error line."""
    if value is None:
        return "missing"
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}"
    if isinstance(value, StringArray):
        return "an array of strings"
    if isinstance(value, list | tuple):
        return "an array"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
