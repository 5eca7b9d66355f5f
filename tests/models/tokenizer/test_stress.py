"""Every pre-tokenizer and tokenizer on the stress texts: the ids that llama.cpp gave."""

import json
from pathlib import Path

import pytest
from stress_texts import CASES, digest, stress_texts

from sparsekv_cli.models.tokenizer.pre import TABLE, PreTokenizer
from sparsekv_cli.models.tokenizer.tokenizer import load_tokenizer

RECORDED = Path(__file__).parents[2] / "data" / "tokenizer" / "stress.json"
DIGESTS = {
    name: digests.split()
    for digests, names in json.loads(RECORDED.read_text("utf-8")).items()
    for name in names
}


def wrong_texts(name: str) -> list[str]:
    """The texts that the tokenizer of a case tokenizes otherwise than llama.cpp."""
    tokenizer = load_tokenizer(CASES[name]())
    pairs = zip(stress_texts(), DIGESTS[name], strict=True)
    return [text for text, expected in pairs if digest(tokenizer.encode(text)) != expected]


@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_ids(name):
    assert wrong_texts(name) == [], "if the cases changed: run scripts/references/tokenizers again"


@pytest.mark.parametrize("name", CASES)
def test_decoding_gives_the_text_back(name):
    tokenizer = load_tokenizer(CASES[name]())
    for text in stress_texts():
        ids = tokenizer.encode(text, add_bos=False, parse_special=False)
        if "<think>" not in text or not name.startswith("spm"):  # that token eats or adds a space
            assert tokenizer.decode(ids) == text


def test_a_cut_that_is_wrong_shows(monkeypatch):
    """The vocabulary joins words: nearly every text tells no cut, and another one, from its own."""
    monkeypatch.setitem(TABLE, "llama-bpe", PreTokenizer((), ignore_merges=True, add_bos=True))
    assert len(wrong_texts("llama-bpe")) > 70
    monkeypatch.setitem(TABLE, "llama-bpe", TABLE["glm4"])
    assert len(wrong_texts("llama-bpe")) == len(stress_texts()), "BOS is missing"
    monkeypatch.setitem(TABLE, "llama-bpe", TABLE["qwen2"])
    assert len(wrong_texts("llama-bpe")) > 70
