"""The table of pre-tokenizers: how each cuts a text, and that the engine reads it as llama.cpp."""

import pytest
import tokenizers
from tokenizers import pre_tokenizers

from sparsekv_cli.models.tokenizer.pre import TABLE, PreTokenizer, find_pre_tokenizer


def pieces(name: str, text: str) -> list[str]:
    """``text`` cut as the pre-tokenizer ``name`` cuts it."""
    splits = [
        pre_tokenizers.Split(tokenizers.Regex(regex), behavior="isolated")
        for regex in TABLE[name].oniguruma()
    ]
    return [piece for piece, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


@pytest.mark.parametrize("name", sorted(TABLE))
def test_no_character_is_lost(name):
    text = "Hello, WORLD's  12345 \n\n\t你好 नमस्ते ½ ... </a> IMGIMGAZ  "
    assert "".join(pieces(name, text)) == text


def test_default():
    assert find_pre_tokenizer(None) is find_pre_tokenizer("") is TABLE["default"]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "I'm  12 x", ["I", "'m", " ", " 12", " x"]),
        ("smollm", "a12", ["a", "1", "2"]),
        ("llama-bpe", "1234 I'M\n\n x", ["123", "4", " I", "'M", "\n\n", " x"]),
        ("qwen2", "12", ["1", "2"]),
        ("default", "a--b 1234", ["a", "--", "b", " ", "123", "4"]),
        ("falcon", "a`b 1234", ["a", "`", "b", " ", "123", "4"]),
        ("tekken", "fooBar/x", ["foo", "Bar", "/x"]),
        ("gpt-4o", "fooBar's 1234", ["foo", "Bar's", " ", "123", "4"]),
        ("deepseek-llm", "ab\n一丁 12", ["ab", "\n", "一丁", " ", "12"]),
        ("deepseek-coder", "ab, 12", ["ab", ",", " ", "1", "2"]),
        ("afmoe", "ab 12345", ["ab", " ", "12", "345"]),
        ("superbpe", "12345", ["12", "345"]),
        ("qwen35", "e\u0301x", ["e\u0301x"]),
        ("command-r", "x9", ["x", "9"]),
    ],
)
def test_pieces_of_pre_tokenizers(name, text, expected):
    assert pieces(name, text) == expected


def test_categories_are_those_of_llama_cpp():
    """The engine may know a newer Unicode; the counts are those of llama.cpp's tables (15.1)."""
    characters = [chr(c) for c in range(0x20000) if not 0xD800 <= c < 0xE000]
    text = "".join(characters)
    for category, count in (("L", 66100), ("N", 1831), ("P", 842), ("M", 2210), ("S", 7775)):
        (regex,) = PreTokenizer((rf"\p{{{category}}}",)).oniguruma()
        split = pre_tokenizers.Split(tokenizers.Regex(regex), behavior="removed")
        left = sum(len(piece) for piece, _ in split.pre_tokenize_str(text))
        assert len(characters) - left == count, category
