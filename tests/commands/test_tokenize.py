"""The command ``tokenize``, through the program's entry point, on a vocabulary-only file."""

import json
from pathlib import Path

import gguf
import pytest
from sample_documents import pdf_of, word_of

from sparsekv_cli.models.tokenizer.bpe import byte_symbols


@pytest.fixture
def vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """256 bytes, ``hi`` = 256, <|im_end|> = 257, <bos> = 258; BOS wanted; no tensors."""
    path = tmp_path / "vocabulary.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*byte_symbols(), "hi", "<|im_end|>", "<bos>"])
    writer.add_token_types([1] * 257 + [3, 3])
    writer.add_token_merges(["h i"])
    writer.add_bos_token_id(258)
    writer.add_eos_token_id(257)
    writer.add_add_bos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    monkeypatch.setenv("SPARSEKV_MODEL", str(path))
    return path


def byte_ids(text: str) -> list[int]:
    """The ids of ``text`` where nothing merges: token n is byte n."""
    return list(text.encode())


def test_lines(vocabulary, invoke):
    result = invoke("tokenize", "-m", str(vocabulary), "-p", "hi\u00e9<|im_end|>")
    assert (result.code, result.err) == (0, "")
    assert result.out == (
        "   258 -> '<bos>'\n   256 -> 'hi'\n   195 -> '\ufffd'\n   169 -> '\ufffd'\n"
        "   257 -> '<|im_end|>'\n"
    )


def test_ids(vocabulary, invoke):
    assert invoke("tokenize", "--ids", "hi").out == "[258, 256]\n"
    assert invoke("tokenize", "--ids", "--no-bos", "hi").out == "[256]\n"
    assert invoke("tokenize", "--ids", "--no-bos", "").out == "[]\n"


def test_json(vocabulary, invoke):
    out = invoke("tokenize", "--json", "hi<|im_end|>\n").out
    assert out == '{"ids": [258, 256, 257, 10], "tokens": ["<bos>", "hi", "<|im_end|>", "\\n"]}\n'


def test_special_tokens_as_text(vocabulary, invoke):
    out = invoke("tokenize", "--json", "--no-bos", "--no-parse-special", "<|im_end|>").out
    assert json.loads(out) == {"ids": byte_ids("<|im_end|>"), "tokens": list("<|im_end|>")}


@pytest.mark.parametrize("data", [b"", b"\n", b"a\r\nb\n\n", b" \xc3\xa9\x00\n"])
def test_every_byte_counts(vocabulary, tmp_path, invoke, data):
    path = tmp_path / "text"
    path.write_bytes(data)
    expected = f"{list(data)}\n"
    assert invoke("tokenize", "--ids", "--no-bos", "-f", str(path)).out == expected
    assert invoke("tokenize", "--ids", "--no-bos", stdin=data).out == expected
    assert invoke("tokenize", "--ids", "--no-bos", "-f", "-", stdin=data).out == expected


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (pdf_of("a b"), "a b"),
        (word_of("a"), "a\nleft | right\nafter it"),
        (b"\xef\xbb\xbfhi\n", "hi\n"),
        ("\ufeffhi".encode("utf-16-le"), "hi"),
    ],
)
def test_the_text_of_a_document(vocabulary, tmp_path, invoke, data, text):
    path = tmp_path / "document"
    path.write_bytes(data)
    for result in (
        invoke("tokenize", "--json", "-f", str(path)),
        invoke("tokenize", "--json", stdin=data),
    ):
        assert "".join(json.loads(result.out)["tokens"][1:]) == text


def test_not_utf8(vocabulary, tmp_path, invoke):
    path = tmp_path / "text"
    path.write_bytes(b"ab\xff")
    for result in (invoke("tokenize", "-f", str(path)), invoke("tokenize", stdin=b"ab\xff")):
        assert result.code == 1 and result.out == ""
        assert "is not UTF-8: byte 0xff at offset 2" in result.err and result.err.count("\n") == 1
    result = invoke("tokenize", "ab\udcff")
    assert result.code == 1 and "not UTF-8: byte 0xff at offset 2" in result.err


def test_missing_files(vocabulary, tmp_path, invoke):
    for arguments in (("-f", str(tmp_path / "none")), ("-m", str(tmp_path / "none"), "a")):
        result = invoke("tokenize", *arguments)
        assert result.code == 1 and "No such file" in result.err and result.err.count("\n") == 1


def test_unknown_pre_tokenizer(tmp_path, invoke):
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("odd")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    result = invoke("tokenize", "-m", str(path), "a")
    assert result.code == 1 and "tokenizer.ggml.pre is 'odd'" in result.err
