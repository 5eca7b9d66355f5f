"""Constrained answers: only tokens that a JSON schema, a grammar or a regular expression allows.

The package llguidance parses the growing answer. Before each token it lists the tokens that may
follow, and the sampler (chain.py) chooses among these.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.sampling.gbnf import is_gbnf, lark_of
from sparsekv_cli.sampling.schema import closed
from sparsekv_cli.system.installation import install_command

# Allowed white space between two parts of a JSON text, as in llama.cpp: none, one space, or one or
# two line breaks and an indentation. Without a limit a model may write spaces for ever.
JSON_OPTIONS = {"whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})"}
NO_TOKEN = "NoExtensionBias"  # llguidance's error for: no token can follow
MOST_CHARS = 500  # characters of an error message
# Lines of llguidance's messages that quote the grammar or mark a place in it.
QUOTES = re.compile(r"\s*(\d+ \||\^)")
# llguidance's messages end with parts for its developers, which begin so.
FOR_DEVELOPERS = re.compile(r"<(backtrace|state|grammar)>")


@dataclass(frozen=True)
class Grammar:
    """The grammar that an answer must match, as ``read_grammar`` returns it."""

    kind: str  # ``json-schema``, ``grammar``, ``regex`` or ``tool_choice``
    definition: str  # in llguidance's form


@dataclass(frozen=True)
class TokenBytes:
    """A vocabulary in the form that llguidance needs. The field names are llguidance's."""

    tokens: list[bytes]  # the bytes of every token
    special_token_ids: list[int]  # control tokens
    eos_token_id: int
    bos_token_id: int | None
    encode: Callable[[str], Sequence[int]]  # text in the middle of a text -> its ids
    is_tokenizer_wrapper: ClassVar[bool] = True

    def __call__(self, text: str) -> list[int]:
        return list(self.encode(text))


def read_grammar(kind: str, text: str) -> Grammar:
    """Returns the grammar that ``text`` defines. kind: see Grammar.

    For "grammar" the text is GBNF (llama.cpp's) or Lark. For "tool_choice" it is Lark, and white
    space in its JSON schemas is limited as in JSON answers. Raises SparseKVError if the grammar
    cannot be compiled or matched, or if llguidance is missing.
    """
    llguidance = require_llguidance()
    matcher = llguidance.LLMatcher
    try:
        if kind == "json-schema":
            text = "{}" if text.strip() == "true" else _closed(text)
            options = JSON_OPTIONS if text.lstrip().startswith("{") else None
            definition = matcher.grammar_from_json_schema(text, defaults=options)
        elif kind == "regex":
            definition = matcher.grammar_from_regex(text)
        elif kind == "tool_choice":
            definition = matcher.grammar_from_lark(text)
        else:
            definition = matcher.grammar_from_lark(lark_of(text) if is_gbnf(text) else text)
    except RecursionError:
        raise SparseKVError(f"--{kind}: nested too deeply") from None
    except Exception as error:  # the converter of GBNF raises plain ones
        raise SparseKVError(f"--{kind}: {in_a_line(str(error))}") from None
    is_error, messages = matcher.validate_grammar_with_warnings(definition, None)
    # A Lark grammar may name special tokens. Only a model's tokenizer can check these names.
    if is_error and "no tokenizer" not in messages[0]:
        raise SparseKVError(f"--{kind}: {in_a_line(messages[0])}")
    return Grammar(kind, definition)


class Constraint:
    """The place of an answer in its grammar, from which the tokens that may follow are known.

    tokenizer: of ``open_tokenizer``. Raises SparseKVError if the grammar does not fit it.
    """

    def __init__(self, grammar: Grammar, tokenizer: Any) -> None:
        self._kind = grammar.kind
        self._at_start = require_llguidance().LLMatcher(tokenizer, grammar.definition, log_level=0)
        self._bits = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)  # one bit a token
        for _ in range(2):  # llguidance refuses some large grammars only when they are used again
            self.restart()
            self.allowed(tokenizer.vocab_size)

    def copy(self) -> Constraint:
        """Returns a constraint with the same grammar, at the start of another answer."""
        new = copy.copy(self)
        new._bits = self._bits.copy()
        new.restart()
        return new

    def restart(self) -> None:
        """Goes back to the start of an answer."""
        self._matcher = self._at_start.deep_copy()

    def allowed(self, n_vocab: int) -> np.ndarray:
        """Returns the ids that may follow, i64 (n,), ascending, below n_vocab.

        Raises SparseKVError if no token may follow, or if parsing exceeds a limit.
        """
        bits = self._bits
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._check()
        flags = np.unpackbits(bits.view(np.uint8), bitorder="little")[:n_vocab]
        return np.flatnonzero(flags.view(np.bool_))

    def accept(self, token: int) -> None:
        """Adds ``token``, one of the allowed ones, to the answer."""
        self._matcher.consume_token(token)
        self._check()

    @property
    def is_finished(self) -> bool:
        """Whether the answer matches the grammar and must end now."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = in_a_line(self._matcher.get_error())
            reason = "no token of the model can follow" if reason == NO_TOKEN else reason
            raise SparseKVError(f"--{self._kind}: {reason}")


def _closed(text: str) -> str:
    """Returns a JSON schema with closed objects (schema.py). Other text stays as it is."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        return text
    new = closed(schema)
    return text if new is schema else json.dumps(new)


def open_tokenizer(vocabulary: TokenBytes, end_ids: Sequence[int]) -> Any:
    """Returns llguidance's tokenizer of a vocabulary. This takes a second for 250,000 tokens.

    end_ids: the tokens that end an answer.
    """
    return require_llguidance().LLTokenizer(vocabulary, eos_token=list(end_ids))


def in_a_line(message: str) -> str:
    """Returns llguidance's message as one line, without quotes of the grammar.

    Parts for llguidance's developers are left out too. A message of more than MOST_CHARS characters
    loses its middle.
    """
    lines = FOR_DEVELOPERS.split(message)[0].splitlines()
    text = " ".join(line.strip() for line in lines if line.strip() and not QUOTES.match(line))
    return text if len(text) <= MOST_CHARS else f"{text[: MOST_CHARS - 100]} ... {text[-90:]}"


def require_llguidance() -> Any:
    """Returns the module llguidance. Raises SparseKVError if it is not installed."""
    try:
        return import_module("llguidance")
    except ImportError:
        raise SparseKVError(
            f"constrained answers need llguidance, which is not installed: "
            f"{install_command('grammar')}"
        ) from None
