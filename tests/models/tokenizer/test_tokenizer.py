"""Tokenizers: tiny vocabularies checked by hand, and llama.cpp's ids for the default model.

SPARSEKV_TOKENIZER_VECTORS may name a folder of llama.cpp's ggml-vocab-*.gguf files with their .inp
and .out: then all cases of all of them run too.
"""

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_vocabularies import NORMAL, bpe_metadata, spm_metadata

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.gguf.file import open_gguf
from sparsekv_cli.models.tokenizer.bpe import byte_symbols
from sparsekv_cli.models.tokenizer.tokenizer import StreamDecoder, Tokenizer, load_tokenizer

RECORDED = Path(__file__).parents[2] / "data" / "tokenizer" / "smollm2.json"
VECTORS = os.environ.get("SPARSEKV_TOKENIZER_VECTORS")
SEPARATOR = "\n__ggml_vocab_test__\n"


def with_token(metadata: dict[str, Any], index: int, text: str) -> dict[str, Any]:
    """The metadata with one token spelled differently."""
    tokens = list(metadata["tokenizer.ggml.tokens"])
    tokens[index] = text
    return {**metadata, "tokenizer.ggml.tokens": tokens}


def texts_of(tokenizer: Tokenizer, text: str, **options: Any) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, **options)]


# byte-level BPE


def test_bpe_merges_by_rank():
    tokenizer = load_tokenizer(bpe_metadata())
    assert tokenizer.encode("hello hello") == [259, 260]
    assert texts_of(tokenizer, "help") == ["he", "l", "p"]
    assert texts_of(tokenizer, "hé") == ["h", "Ã", "©"]
    assert tokenizer.encode("") == []


def test_bpe_words_are_cut_first():
    by_digit = load_tokenizer(bpe_metadata())  # smollm: every digit a piece
    together = load_tokenizer(bpe_metadata(pre="gpt-2"))
    assert texts_of(by_digit, "12") == ["1", "2"]
    assert texts_of(together, "12") == ["12"]
    assert texts_of(together, "hel lo") == ["he", "l", "Ġ", "l", "o"]


def test_ignore_merges():
    """Without the merge that makes it, hello is a token only where words are looked up whole."""
    merges = ["h e", "l l", "he ll"]
    assert texts_of(load_tokenizer(bpe_metadata(merges=merges)), "hello") == ["hell", "o"]
    whole = load_tokenizer(bpe_metadata(merges=merges, pre="llama-bpe", add_bos_token=False))
    assert texts_of(whole, "hello") == ["hello"]


def test_first_rank_of_a_doubled_merge_counts():
    merges = ["h e", "l l", "he ll", "hell o", "h e"]
    assert texts_of(load_tokenizer(bpe_metadata(merges=merges)), "hello") == ["hello"]


def test_missing_bytes_are_dropped_and_do_not_join_their_neighbours():
    metadata = with_token(bpe_metadata(), byte_symbols().index("x"), "[no x]")
    tokenizer = load_tokenizer(metadata)
    assert texts_of(tokenizer, "hxe he") == ["h", "e", "Ġ", "he"]


def test_special_tokens_are_split_first():
    tokenizer = load_tokenizer(bpe_metadata())
    assert tokenizer.encode("<|im_start|>hello<|im_end|>") == [262, 259, 263]
    plain = tokenizer.encode("<|im_end|>", parse_special=False)
    assert 263 not in plain and tokenizer.decode(plain) == "<|im_end|>"
    # user-defined tokens always, the longest first
    for parse_special in (True, False):
        assert tokenizer.encode("<tool>><tool>", parse_special=parse_special) == [265, 264]


def test_bos_and_eos():
    tokenizer = load_tokenizer(bpe_metadata(add_bos_token=True, add_eos_token=True))
    assert tokenizer.add_bos
    assert tokenizer.encode("hello") == [262, 259, 263]
    assert tokenizer.encode("hello", add_bos=False) == [259]
    assert tokenizer.encode("") == [262, 263]
    without = load_tokenizer(bpe_metadata())
    assert not without.add_bos
    assert without.encode("hello", add_bos=True) == [262, 259]
    assert load_tokenizer(bpe_metadata(pre="llama-bpe")).add_bos
    nothing = load_tokenizer(bpe_metadata(bos_token_id=None, add_bos_token=True))
    with pytest.raises(SparseKVError, match="no BOS token"):
        nothing.encode("hello")


def test_special_ids():
    tokenizer = load_tokenizer(bpe_metadata(eos_token_id=259, unknown_token_id=1))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eot_id) == (262, 259, 263)
    assert (tokenizer.eom_id, tokenizer.unk_id, tokenizer.pad_id) == (None, 1, None)
    assert tokenizer.eog_ids == {259, 263}  # eos by id, <|im_end|> by its text
    assert tokenizer.n_vocab == 267
    assert [i for i in range(tokenizer.n_vocab) if tokenizer.is_control(i)] == [262, 263]


def test_texts_that_end_a_generation_become_control_tokens():
    tokenizer = load_tokenizer(with_token(bpe_metadata(), 266, "</s>"))
    assert tokenizer.eog_ids == {263, 266} and tokenizer.is_control(266)
    assert tokenizer.encode("</s>") == [266]
    assert 266 not in tokenizer.encode("</s>", parse_special=False)


def test_tool_calling_models_do_not_stop_at_end():
    metadata = bpe_metadata()
    for index, text in ((261, "<|end|>"), (264, "<|return|>"), (265, "<|call|>")):
        metadata = with_token(metadata, index, text)
    metadata["tokenizer.ggml.merges"] = metadata["tokenizer.ggml.merges"][:-1]
    tokenizer = load_tokenizer(metadata)
    assert tokenizer.eog_ids == {263, 264, 265} and not tokenizer.is_control(261)


def test_pieces():
    tokenizer = load_tokenizer(bpe_metadata())
    assert tokenizer.token_bytes(260) == b" hello"
    assert tokenizer.token_bytes(byte_symbols().index("Ã")) == b"\xc3"
    assert tokenizer.token_bytes(263) == b"<|im_end|>"
    assert tokenizer.token_bytes(266) == b""  # unused
    assert tokenizer.decode([262, 259, 263]) == "<|im_start|>hello<|im_end|>"
    assert tokenizer.decode([262, 259, 263, 264], skip_special=True) == "hello<tool>"
    for token_id in (-1, 267):
        with pytest.raises(ValueError, match=f"token id {token_id}"):
            tokenizer.token_bytes(token_id)


def test_lone_surrogate_is_refused():
    with pytest.raises(SparseKVError, match="character 1"):
        load_tokenizer(bpe_metadata()).encode("a\ud800")


# SentencePiece


def test_spm_merges_by_score():
    tokenizer = load_tokenizer(spm_metadata())
    assert tokenizer.add_bos and tokenizer.encode("a") == [1, tokenizer._vocabulary.ids["▁a"]]
    assert texts_of(tokenizer, "ab", add_bos=False) == ["▁", "ab"]  # ab before ▁a
    assert texts_of(tokenizer, "bab", add_bos=False) == ["▁", "bab"]  # ba first, then bab
    assert texts_of(tokenizer, "abab", add_bos=False) == ["▁a", "bab"]
    assert texts_of(tokenizer, "  a", add_bos=False) == ["▁▁", "▁a"]
    assert texts_of(tokenizer, "é", add_bos=False) == ["▁", "<0xC3>", "<0xA9>"]
    assert texts_of(tokenizer, "\n\0", add_bos=False) == ["▁", "<0x0A>", "<0x00>"]
    assert tokenizer.encode("") == [1]


def test_spm_space_comes_back_after_a_special_token():
    tokenizer = load_tokenizer(spm_metadata())
    assert texts_of(tokenizer, "a</s>a<user>a") == ["<s>", "▁a", "</s>", "▁a", "<user>", "▁a"]
    plain = load_tokenizer(spm_metadata(add_space_prefix=False, add_bos_token=False))
    assert texts_of(plain, "a</s>a") == ["a", "</s>", "a"]


def test_spm_scores_equal_leftmost_first():
    scores = spm_metadata()["tokenizer.ggml.scores"].copy()
    scores[259:] = -1
    tokenizer = load_tokenizer(spm_metadata(scores=scores, add_space_prefix=False))
    assert texts_of(tokenizer, "aba", add_bos=False) == ["ab", "a"]


def test_spm_control_tokens_can_be_spelled_by_merges():
    """llama.cpp merges into any token, so ``<s>`` is reachable where its parts are tokens."""
    metadata = spm_metadata(add_bos_token=False, add_space_prefix=False)
    for index, text in ((259, "<"), (260, "s>"), (261, "s"), (262, ">")):
        metadata = with_token(metadata, index, text)
    assert load_tokenizer(metadata).encode("<s>", parse_special=False) == [1]


def test_spm_decodes():
    tokenizer = load_tokenizer(spm_metadata())
    ids = tokenizer.encode("a é", add_bos=False)
    assert tokenizer.decode(ids) == "a é"
    assert tokenizer.decode([1, *ids], skip_special=True) == " a é"  # as llama.cpp
    assert tokenizer.decode([1]) == "<s>"


def test_phi3_loses_spaces_after_special_tokens():
    tokenizer = load_tokenizer(spm_metadata(general__name="Phi-3 mini"))
    assert texts_of(tokenizer, "<user> \n a", add_bos=False) == ["<user>", "▁a"]
    assert texts_of(tokenizer, "<s> a", add_bos=False) == ["<s>", "▁", "▁a"]


# streaming


@pytest.mark.parametrize("make", [bpe_metadata, spm_metadata])
@pytest.mark.parametrize("skip_special", [False, True])
def test_streaming_equals_decoding(make, skip_special):
    tokenizer = load_tokenizer(make())
    generator = random.Random(0)
    texts = ["hé 👍 12", " a", "👨‍👩‍👧", "<|im_end|>ab</s>"]
    sequences = [tokenizer.encode(text) for text in texts]
    sequences += [[generator.randrange(tokenizer.n_vocab) for _ in range(40)] for _ in range(50)]
    decoder = StreamDecoder(tokenizer, skip_special=skip_special)
    for ids in sequences:
        parts = [decoder.push(i) for i in ids] + [decoder.flush()]
        assert "".join(parts) == tokenizer.decode(ids, skip_special=skip_special)


def test_streaming_holds_back_incomplete_characters():
    tokenizer = load_tokenizer(bpe_metadata())
    decoder = StreamDecoder(tokenizer)
    parts = [decoder.push(i) for i in tokenizer.encode("h👍")]
    assert parts == ["h", "", "", "", "👍"]
    half = tokenizer.encode("é")[0]
    assert decoder.push(half) == "" and decoder.flush() == "\ufffd"
    assert decoder.push(262) == "" and decoder.push(259) == "hello"


# bad vocabularies: FORMAT items 37 to 40

BAD_BPE: list[tuple[str, dict[str, Any], str]] = [
    ("model missing", {"model": None}, "model is missing"),
    ("model", {"model": "t5"}, "model is 't5'"),
    ("model type", {"model": 3}, "model is 3"),
    ("pre", {"pre": "nonsense"}, "pre is 'nonsense'"),
    ("pre type", {"pre": 7}, "pre is 7"),
    ("tokens missing", {"tokens": None}, "tokens is missing"),
    ("tokens empty", {"tokens": []}, "tokens is empty"),
    ("tokens mistyped", {"tokens": np.arange(9)}, "tokens is an array of int64"),
    ("tokens no array", {"tokens": "abc"}, "tokens is 'abc'"),
    ("types missing", {"token_type": None}, "token_type is missing"),
    ("types short", {"token_type": np.ones(9, np.int32)}, "9 elements for 267 tokens"),
    ("types mistyped", {"token_type": np.ones(267, np.float32)}, "token_type is an array of f"),
    ("merges missing", {"merges": None}, "merges is missing"),
    ("merges mistyped", {"merges": np.ones(9, np.int32)}, "merges is an array of int32"),
    ("merge without space", {"merges": ["he"]}, "malformed merge 'he'"),
    ("merge of nothing", {"merges": [" h"]}, "malformed merge ' h'"),
    ("empty merge", {"merges": [""]}, "malformed merge ''"),
    ("merge of no token", {"merges": ["h zz"]}, "'zz' is not in the vocabulary"),
    ("merge to no token", {"merges": ["h l"]}, "'hl' is not in the vocabulary"),
    ("merge of three", {"merges": ["h e l"]}, "malformed merge 'h e l'"),
    ("id too large", {"eos_token_id": 267}, "eos_token_id = 267: must be a token id, 0 to 266"),
    ("id negative", {"bos_token_id": -1}, "bos_token_id = -1"),
    ("id mistyped", {"padding_token_id": "0"}, "padding_token_id is '0'"),
    ("id boolean", {"eot_token_id": True}, "eot_token_id is True"),
    ("flag mistyped", {"add_bos_token": 1}, "add_bos_token is 1"),
]


@pytest.mark.parametrize(
    ("changes", "message"), [c[1:] for c in BAD_BPE], ids=[c[0] for c in BAD_BPE]
)
def test_bad_bpe_vocabulary(changes, message):
    with pytest.raises(SparseKVError) as error:
        load_tokenizer(bpe_metadata(**changes))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_bad_tokens():
    with pytest.raises(SparseKVError, match="tokens 104 and 266 are both 'h'"):
        load_tokenizer(with_token(bpe_metadata(), 266, "h"))
    for text in ("<0x4g>", "0x41", "<0x041>", "<0x4a>"):
        with pytest.raises(SparseKVError, match="token 10 is a byte token spelled"):
            load_tokenizer(with_token(spm_metadata(), 10, text))
    types = spm_metadata()["tokenizer.ggml.token_type"].copy()
    types[10] = NORMAL
    with pytest.raises(SparseKVError, match="no byte token <0x07>"):
        load_tokenizer(with_token(spm_metadata(token_type=types), 10, "seven"))


def test_bad_scores():
    n_tokens = len(spm_metadata()["tokenizer.ggml.tokens"])
    for scores, message in (
        (None, "scores is missing"),
        (np.zeros(5, np.float32), "scores has 5 elements"),
        (["a"] * n_tokens, "scores is an array of <U1"),
        (np.full(n_tokens, np.nan, np.float32), "token 0 has nan"),
    ):
        with pytest.raises(SparseKVError, match=message):
            load_tokenizer(spm_metadata(scores=scores))


def test_special_ids_that_are_not_given():
    assert load_tokenizer(spm_metadata()).eos_id == 2
    bare = load_tokenizer(bpe_metadata(bos_token_id=None, eos_token_id=None, pre=None))
    assert bare.bos_id is None and bare.eos_id is None and bare.eog_ids == {263}


# real vocabularies


@pytest.fixture(scope="module")
def smollm2(default_model: Path) -> Iterator[dict[str, Any]]:
    """The metadata of the default model."""
    with open_gguf(default_model) as gguf:
        yield dict(gguf.metadata)


def test_llama_cpp_ids_of_the_default_model(smollm2):
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    tokenizer = load_tokenizer(smollm2)
    assert tokenizer.eog_ids == set(recorded["eog_ids"])
    for case in recorded["cases"]:
        for parse in (True, False) if case["parse_special"] is None else (case["parse_special"],):
            assert tokenizer.encode(case["text"], parse_special=parse) == case["ids"], case
        assert tokenizer.decode(case["ids"]) == case["text"]


def test_loading_the_default_model_is_quick(smollm2):
    """The bound leaves room for a machine with other work."""
    times = []
    for _ in range(3):
        start = time.thread_time()
        load_tokenizer(smollm2)
        times.append(time.thread_time() - start)
    assert min(times) < 1


@pytest.mark.skipif(VECTORS is None, reason="SPARSEKV_TOKENIZER_VECTORS names no folder")
@pytest.mark.parametrize(
    "path",
    [
        p
        for p in sorted(Path(VECTORS or "/nonexistent").glob("*.gguf"))
        if Path(f"{p}.inp").exists()
    ],
    ids=lambda path: path.stem,
)
def test_vectors(path):
    texts = Path(f"{path}.inp").read_bytes().decode().split(SEPARATOR)
    lines = Path(f"{path}.out").read_text().splitlines()
    with open_gguf(path, vocab_only_ok=True) as gguf:
        tokenizer = load_tokenizer(gguf.metadata)
    for text, line in zip(texts, lines, strict=False):
        ids = tokenizer.encode(text, add_bos=False, parse_special=False)
        assert ids == [int(i) for i in line.split()], text
