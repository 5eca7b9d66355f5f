"""Makes the sampler of an answer from the user's settings, the model file and a grammar."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.sampling.params import params_from_metadata

if TYPE_CHECKING:
    from sparsekv_cli.generation.constraint import AnswerConstraint
    from sparsekv_cli.model import Model
    from sparsekv_cli.models.chat.thinking import Thinking
    from sparsekv_cli.models.tokenizer.tokenizer import Tokenizer
    from sparsekv_cli.sampling.dry import Breakers, VocabularyBytes
    from sparsekv_cli.sampling.grammar import Grammar
    from sparsekv_cli.sequence import Sample

N_VOCABULARIES = 8  # models whose vocabularies are stored for grammars
N_BREAKERS = 32  # stored lists of sequence breakers of DRY


@dataclass(frozen=True)
class SamplingOptions:
    """The user's settings. Missing ones have the model file's value, or llama.cpp's default."""

    explicit: Mapping[str, Any]  # name of a field of SamplingParams -> value
    ignore_eos: bool = False  # never choose a token that ends the text
    grammar: Grammar | None = None  # form of every answer after its thinking
    think_budget: int | None = None  # most tokens of thinking; None: see AnswerConstraint


def new_constraint(
    tokenizer: Tokenizer,
    sampling: SamplingOptions,
    thinking: Thinking | None,
    think: bool | None = None,
) -> AnswerConstraint | None:
    """Returns the constraint of an answer; None: any answer is allowed.

    thinking: the markers of thinking; None: the model does not think. think: whether it thinks;
    None: its template decides. The first grammar of a model is slow, because it reads the model's
    vocabulary.
    """
    grammar, budget = sampling.grammar, sampling.think_budget
    if think is False and grammar is not None and thinking is not None:
        budget = 0  # the template may let the model think in spite of this
    if grammar is None and budget is None:
        return None
    from sparsekv_cli.generation.constraint import AnswerConstraint
    from sparsekv_cli.sampling.grammar import Constraint

    matched = None if grammar is None else Constraint(grammar, _tokenizer_of_grammars(tokenizer))
    return AnswerConstraint(tokenizer, thinking, matched, budget)


def new_sampler(
    model: Model,
    sampling: SamplingOptions,
    seed: int | None,
    constraint: AnswerConstraint | None = None,
) -> Sample:
    """Returns the sampler of an answer. The user's values come before the model file's.

    seed: None means the user's value, or a random one. constraint: the result of
    ``new_constraint``.
    """
    from sparsekv_cli.sampling.chain import make_sampler

    tokenizer = model.tokenizer
    explicit = dict(sampling.explicit)
    if seed is not None:
        explicit["seed"] = seed
    if sampling.ignore_eos:
        bans = {int(token): -math.inf for token in tokenizer.eog_ids}
        explicit["logit_bias"] = {**explicit.get("logit_bias", {}), **bans}
    return make_sampler(
        params_from_metadata(model.gguf.metadata, explicit),
        find_breakers=functools.partial(_find_breakers, tokenizer),
        constraint=constraint,
    )


def forget_vocabularies() -> None:
    """Frees the vocabularies and breakers that are stored for later samplers."""
    _tokenizer_of_grammars.cache_clear()
    _pieces.cache_clear()
    _find_breakers.cache_clear()


@functools.lru_cache(N_VOCABULARIES)
def _tokenizer_of_grammars(tokenizer: Tokenizer) -> Any:
    from sparsekv_cli.sampling.grammar import TokenBytes, open_tokenizer

    ids, end_ids = range(tokenizer.n_vocab), sorted(tokenizer.eog_ids)
    if not end_ids:
        raise SparseKVError("this model has no token that ends an answer: use a model with one")
    vocabulary = TokenBytes(
        [tokenizer.token_bytes(token) for token in ids],
        [token for token in ids if not tokenizer.is_shown(token)],
        end_ids[0] if tokenizer.eos_id is None else tokenizer.eos_id,
        tokenizer.bos_id,
        tokenizer.encode_within,
    )
    return open_tokenizer(vocabulary, end_ids)


@functools.lru_cache(1)
def _pieces(tokenizer: Tokenizer) -> VocabularyBytes:
    from sparsekv_cli.sampling.dry import pieces_of

    return pieces_of(tokenizer.n_vocab, tokenizer.token_bytes)


@functools.lru_cache(N_BREAKERS)
def _find_breakers(tokenizer: Tokenizer, texts: tuple[str, ...]) -> Breakers:
    """Returns the places of DRY's sequence breakers in a model's vocabulary. The search is slow."""
    from sparsekv_cli.sampling.dry import find_breakers

    def tokenize(text: str) -> Sequence[int]:
        return tokenizer.encode(text, add_bos=False, parse_special=False)

    return find_breakers(texts, _pieces(tokenizer), tokenize)
