"""Constrained answers: which tokens may follow, when an answer is whole, what is refused."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_vocabularies import bpe_metadata, spm_metadata

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.sampler import SamplingOptions, new_constraint, new_sampler
from sparsekv_cli.models.tokenizer.tokenizer import Tokenizer, load_tokenizer
from sparsekv_cli.sampling.grammar import Constraint, read_grammar

BPE = load_tokenizer(bpe_metadata())
SPM = load_tokenizer(spm_metadata())
MODEL: Any = SimpleNamespace(tokenizer=BPE, gguf=SimpleNamespace(metadata={}))
BOTH = pytest.mark.parametrize("tokenizer", [BPE, SPM], ids=["bpe", "spm"])
END = 263  # <|im_end|> of BPE


def constraint_of(kind: str, text: str, tokenizer: Tokenizer = BPE) -> Constraint:
    grammar = read_grammar(kind, text)
    constraint = new_constraint(tokenizer, SamplingOptions({}, grammar=grammar), None)
    assert constraint is not None
    return constraint


def texts(constraint: Constraint, tokenizer: Tokenizer = BPE) -> list[bytes]:
    ids = constraint.allowed(tokenizer.n_vocab)
    return sorted(tokenizer.token_bytes(int(token)) for token in ids)


def say(constraint: Constraint, text: str, tokenizer: Tokenizer = BPE) -> None:
    for token in tokenizer.encode_within(text):
        assert token in constraint.allowed(tokenizer.n_vocab)
        constraint.accept(token)


def matches(constraint: Constraint, text: str, tokenizer: Tokenizer = BPE) -> bool:
    """Whether the text may be said and may end there."""
    constraint.restart()
    for token in tokenizer.encode_within(text):
        if token not in constraint.allowed(tokenizer.n_vocab):
            return False
        constraint.accept(token)
    allowed = set(constraint.allowed(tokenizer.n_vocab).tolist())
    return constraint.is_finished or bool(allowed & tokenizer.eog_ids)


def test_tokens_that_may_follow():
    constraint = constraint_of("regex", "hell(o|i)+")
    assert texts(constraint) == [b"h", b"he", b"hell", b"hello"]
    say(constraint, "hell")
    assert texts(constraint) == [b"i", b"o"] and not constraint.is_finished
    say(constraint, "o")
    assert texts(constraint) == [b"<|im_end|>", b"i", b"o"] and not constraint.is_finished
    constraint.restart()
    assert texts(constraint) == [b"h", b"he", b"hell", b"hello"]


def test_spm_tokens_and_bytes_may_follow():
    """Nothing is put before what the grammar forces; a text's byte token is as good."""
    constraint = constraint_of("regex", "b(a|ab)", SPM)
    say(constraint, "b", SPM)
    assert texts(constraint, SPM) == [b"a", b"a", b"ab"]
    say(constraint, "ab", SPM)
    assert constraint.is_finished


@BOTH
def test_control_and_unused_tokens_are_no_text(tokenizer):
    allowed = constraint_of("regex", "(?s:.*)", tokenizer).allowed(tokenizer.n_vocab).tolist()
    assert {token for token in allowed if not tokenizer.is_shown(token)} == tokenizer.eog_ids
    assert all(tokenizer.token_bytes(token) for token in allowed)


def test_an_answer_is_finished_where_nothing_can_follow():
    schema = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],'
    constraint = constraint_of("json-schema", schema + '"additionalProperties": false}')
    for text in ('{"a":1}', '{\n  "a": 2\n}'):
        constraint.restart()
        say(constraint, text[:-1])
        assert not constraint.is_finished
        say(constraint, text[-1])
        assert constraint.is_finished
    assert not matches(constraint, '{"a":3}') and not matches(constraint, '{"b":1}')


@pytest.mark.parametrize("schema", ["{}", " true\n"])
def test_any_json(schema):
    constraint = constraint_of("json-schema", schema)
    for text in ("null", "-1.5e3", '["a", {"b": []}]', '"h\\né"', "{\n\n    }"):
        assert matches(constraint, text), text
    for text in ("{a}", "[1,]", " 1", "'a'", "{ " + " " * 3, "{" + "\n" * 3):
        assert not matches(constraint, text), text


def test_white_space_is_bounded_unless_the_schema_says_otherwise():
    item = '"type": "array", "items": {"type": "integer"}'
    assert not matches(constraint_of("json-schema", f"{{{item}}}"), "[     1]")
    own = f'{{{item}, "x-guidance": {{"whitespace_pattern": " +"}}}}'
    assert matches(constraint_of("json-schema", own), "[     1]")


GBNF = 'root ::= item+\nitem ::= "- " word "\\n" # a line\nword ::= [a-z]+ | "(" word ")"\n'
LARK = 'start: item+\nitem: "- " word "\\n"\nword: /[a-z]+/ | "(" word ")"\n'


@pytest.mark.parametrize("grammar", [GBNF, LARK], ids=["gbnf", "lark"])
def test_grammars(grammar):
    constraint = constraint_of("grammar", grammar)
    assert matches(constraint, "- hello\n- ((x))\n")
    for text in ("", "- hello", "- \n", "- (x\n", "hello"):
        assert not matches(constraint, text), text


# GBNF that llama.cpp takes: a grammar, a text that matches, one that does not.
LEGAL = [
    ('root ::= my-rule my_rule\nmy-rule ::= "a"\nmy_rule ::= "b"', "ab", "aa"),
    ('root ::= Foo foo fooBar\nFoo ::= "a"\nfoo ::= "b"\nfooBar ::= "c" fooBar?', "abc", "bac"),
    ('root ::= start "b"\nstart ::= "a"', "ab", "b"),
    ('root ::= "a"{0} ("a" x){0,0} [ac]{0} x{0} "b"\nx ::= "x"', "b", "ab"),
    ('root ::= 1 json-1 rule_0\n1 ::= "a"\njson-1 ::= "b"\nrule_0 ::= "c"', "abc", "aaa"),
    (r'root ::= "\u00e9" "\U0001F600" "\x41" [\u0062-\u0063]', "é😀Ac", "é😀Aa"),
    (r'root ::= [^"\\\x7F\x00-\x1F] "\x01\"\\"', 'a\x01"\\', '"\x01"\\'),
    ('root ::= "a\nb" ("b"{2})* ("c"+ )? # "[', "a\nbbbccc", "a\nbb b"),
    ("root ::= [a-c&&b] [+--] [~~a] [^^] [a-]", "&,~a-", "&,~^-"),
    ('root ::= "a" . .{2} "b"', "a\n.éb", "a\nb"),
]


@pytest.mark.parametrize(("grammar", "text", "other"), LEGAL)
def test_gbnf_that_llama_cpp_takes(grammar, text, other):
    constraint = constraint_of("grammar", grammar)
    assert matches(constraint, text) and not matches(constraint, other)


def test_a_lark_grammar_may_name_the_models_special_tokens():
    constraint = constraint_of("grammar", 'start: "a" <|im_start|> "b"')
    say(constraint, "a")
    assert texts(constraint) == [b"<|im_start|>"]
    with pytest.raises(SparseKVError, match="unknown special token"):
        constraint_of("grammar", 'start: "a" <|im_stop|> "b"')


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("json-schema", "{", "--json-schema: EOF while parsing an object at line 1 column 1"),
        ("json-schema", "[]", "--json-schema: schema must be an object or boolean"),
        ("json-schema", '{"a":' + "[" * 100_000, "--json-schema: recursion limit exceeded"),
        ("json-schema", '{"uniqueItems": true}', '--json-schema: Unimplemented keys: ["unique'),
        ("json-schema", '{"type": "number", "minimum": 2, "maximum": 1}', "--json-schema: Unsati"),
        ("json-schema", "false", "--json-schema: Unsatisfiable schema: schema is false"),
        ("json-schema", '{"$ref": "#"}', "--json-schema: no token of the model can follow"),
        ("regex", "a+(", '--regex: at 1(8): invalid regex "a+("'),
        ("regex", "a(?=b)", '--regex: at 1(8): invalid regex "a(?=b)"'),
        ("regex", r"[^\s\S]", "--regex: no token of the model can follow"),
        ("grammar", "", "--grammar: No 'root' rule found"),
        ("grammar", 'root ::= "a', "--grammar: Unexpected end of input at line 1"),
        ("grammar", "root ::= word", "--grammar: Rule 'word' not found"),
        ("grammar", "root ::= " + "[" * 100_000, "--grammar: Unexpected end of input at line 1"),
        ("grammar", r'root ::= "\ud800"', r"--grammar: \ud800 is no character"),
        ("grammar", "root ::= " + "(" * 50_000, "--grammar: nested too deeply"),
        ("grammar", "start: word", '--grammar: at 1(8): unknown name: "word"'),
        ("grammar", "root ::= root", "--grammar: no token of the model can follow"),
    ],
)
def test_what_cannot_be_matched_is_refused_in_a_line(kind, text, expected):
    with pytest.raises(SparseKVError) as info:
        constraint_of(kind, text)
    assert str(info.value).startswith(expected)
    assert "\n" not in str(info.value) and len(str(info.value)) < 300


def test_a_token_that_cannot_follow_is_an_error():
    constraint = constraint_of("regex", "ab")
    with pytest.raises(SparseKVError, match="--regex: ") as info:
        constraint.accept(ord("b"))
    assert "\n" not in str(info.value) and "<" not in str(info.value)
    constraint.restart()
    say(constraint, "ab")


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(SparseKVError, match=r"pip install .*\[grammar\]'"):
        read_grammar("regex", "a")


# the sampler chain


def sampled(regex: str, params: dict[str, Any], best: dict[int, float], n: int) -> str:
    """The first n tokens that a sampler chooses of the same logits, 0 but for ``best``."""
    constraint = constraint_of("regex", regex)
    sample = new_sampler(MODEL, SamplingOptions(params), None, constraint)
    logits = np.zeros(BPE.n_vocab, np.float32)
    for token, logit in best.items():
        logits[token] = logit
    history: list[int] = []
    for _ in range(n):
        history.append(sample(logits, history))
    return BPE.decode(history)


A, B, C = BPE.encode_within("abc")


@pytest.mark.parametrize(
    "params",
    [
        {"temp": 0}, {"top_k": 1}, {"temp": 0.01, "top_k": 0}, {"top_p": 0.01}, {"min_p": 0.99},
        {"top_n_sigma": 0.1}, {"temp": 0, "repeat_penalty": 1.01},
        {"temp": 0, "logit_bias": {C: 99.0}},
    ],
    ids=str,
)  # fmt: skip
def test_the_chain_sees_what_may_follow_only(params):
    best = {C: 30.0, B: 20.0, A: 15.0, END: 10.0}
    assert sampled("[ab]{3}", {"seed": 1, **params}, best, 3) == "bbb"


def test_penalties_choose_among_what_may_follow():
    params = {"temp": 0, "dry_multiplier": 5.0, "dry_allowed_length": 1}
    best = {C: 30.0, B: 4.0, A: 2.0}
    assert sampled("[ab]{6}", {"temp": 0}, best, 6) == "bbbbbb"
    assert sampled("[ab]{6}", params, best, 6).startswith("bba")
    penalty = {"temp": 0, "repeat_penalty": 4.0}
    assert sampled("[ab]{2}", penalty, best, 2) == "ba"


@pytest.mark.parametrize("narrowed_by", ["top_k", "grammar"])
def test_breakers_are_looked_for_in_the_whole_vocabulary(narrowed_by):
    """The first step's candidates all have smaller ids than the breaker."""
    options: dict[str, Any] = {"temp": 0, "dry_multiplier": 9.0, "dry_sequence_breakers": (":",)}
    if narrowed_by == "top_k":
        options |= {"samplers": ("top_k", "dry", "temperature"), "top_k": 2}
    constraint = constraint_of("regex", "!+[bc]") if narrowed_by == "grammar" else None
    sample = new_sampler(MODEL, SamplingOptions(options), None, constraint)
    logits = np.zeros(BPE.n_vocab, np.float32)
    logits[ord("!")] = 9.0
    assert sample(logits, []) == ord("!") < ord(":")
    logits[ord("!")], logits[B], logits[C] = 0.0, 9.0, 8.0
    assert sample(logits, BPE.encode_within("a:ba:")) == B
