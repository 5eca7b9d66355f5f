"""Gemma 4's tokenizer: what it asks of a file, and its special tokens; its ids: test_stress.py."""

from typing import Any

import numpy as np
import pytest
from stress_texts import of_characters

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.tokenizer.tokenizer import load_tokenizer


def metadata(**changes: Any) -> dict[str, Any]:
    return of_characters("gemma4", **{f"tokenizer.ggml.{key}": changes[key] for key in changes})


def spelled(old: str, new: str) -> dict[str, Any]:
    """The metadata with one token spelled differently."""
    tokens = list(metadata()["tokenizer.ggml.tokens"])
    tokens[tokens.index(old)] = new
    return metadata(tokens=tokens)


def tokens_without(old: str) -> tuple[list[str], np.ndarray]:
    """Tokens and types with a normal token in place of one."""
    whole = metadata()
    tokens, types = list(whole["tokenizer.ggml.tokens"]), whole["tokenizer.ggml.token_type"].copy()
    index = tokens.index(old)
    tokens[index], types[index] = "another", 1
    return tokens, types


def test_newlines_are_tokens_of_their_own():
    tokenizer = load_tokenizer(metadata())
    ids = tokenizer.encode("a\n\n\nb", add_bos=False)
    assert [tokenizer.token_text(i) for i in ids] == ["a", "\n\n\n", "b"]
    assert tokenizer.decode(tokenizer.encode("\n" * 40, add_bos=False)) == "\n" * 40


def test_what_is_no_token_is_spelled_in_bytes():
    tokenizer = load_tokenizer(metadata())
    ids = tokenizer.encode("\U0001f9ff", add_bos=False)
    assert [tokenizer.token_text(i) for i in ids] == ["<0xF0>", "<0x9F>", "<0xA7>", "<0xBF>"]
    tokens, types = tokens_without("<0x41>")
    with pytest.raises(SparseKVError, match="has no byte token <0x41>"):
        load_tokenizer(metadata(tokens=tokens, token_type=types))


def test_merges_are_needed():
    without = metadata()
    del without["tokenizer.ggml.merges"]
    with pytest.raises(SparseKVError, match=r"tokenizer\.ggml\.merges is missing"):
        load_tokenizer(without)


def test_an_end_of_sequence_that_is_a_text():
    """</s> ends an answer, but not where the vocabulary has Gemma 4's <|tool_response>."""
    ends = load_tokenizer(metadata()).eog_ids
    assert 2 in ends
    tokenizer = load_tokenizer(spelled("<think>", "<|tool_response>"))
    assert 2 not in tokenizer.eog_ids and not tokenizer.is_control(2)
