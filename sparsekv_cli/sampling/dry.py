"""DRY ("don't repeat yourself"): a penalty that grows with the length of a repetition.

A token is penalised if, after it, the end of the context would repeat an earlier passage. If n
tokens are already repeated, the penalty is multiplier * base**(n - allowed_length). A repetition
does not reach across a sequence breaker, such as a line end or a quote. Idea: p-e-w,
text-generation-webui pull request 5677; the details follow llama.cpp (src/llama-sampler.cpp,
llama_sampler_dry).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

# The tokens after a breaker's first token -> the ids of its possible first tokens, i32, ascending.
# An empty tuple: the breaker lies within one token.
Breakers = Mapping[tuple[int, ...], np.ndarray]

MAX_BREAKER_BYTES = 40  # llama.cpp's MAX_CHAR_LEN and MAX_SEQ_LEN
MAX_TAIL_TOKENS = 20
LOG_FLOAT_MAX = np.float32(88.7228391)  # base**exponent must not exceed f32
LEAST_GROWING_BASE = 1.000001
MOST_COMPARED = 64  # tokens compared for each token of the context, before Z's algorithm takes over


class VocabularyBytes(NamedTuple):
    """The bytes of all tokens of a vocabulary, one token after another."""

    text: np.ndarray  # u8, the bytes of all tokens, and one byte more
    token_of: np.ndarray  # i32, the token of each byte
    ends: np.ndarray  # i64 (n_vocab,), where each token's bytes end


def pieces_of(n_vocab: int, piece: Callable[[int], bytes]) -> VocabularyBytes:
    """Returns the bytes of tokens 0 to n_vocab - 1. piece: returns the bytes of one token."""
    words = [piece(token) for token in range(n_vocab)]
    lengths = [len(word) for word in words]
    text = np.frombuffer(b"".join(words) + b"\0", np.uint8)
    return VocabularyBytes(
        text, np.repeat(np.arange(n_vocab, dtype=np.int32), lengths), np.cumsum(lengths)
    )


def find_breakers(
    texts: Sequence[str], pieces: VocabularyBytes, tokenize: Callable[[str], Sequence[int]]
) -> Breakers:
    """Returns the tokens in which a breaker lies or begins.

    If a token ends with the first bytes of a breaker, its entry has the tokens of the other bytes.
    With the breaker "ab", the token "xa" stands under the tokens of "b". Splits inside a character
    are left out, because such bytes are no text.
    """
    heads: dict[tuple[int, ...], list[np.ndarray]] = {}
    for breaker in {text.encode()[:MAX_BREAKER_BYTES] for text in texts}:
        whole, parts = occurrences(breaker, pieces)
        heads.setdefault((), []).append(whole)
        for rest, tokens in parts.items():
            tail = tail_tokens(rest, tokenize)
            if tail is not None:
                heads.setdefault(tail, []).append(np.setdiff1d(tokens, whole))
    return {tail: np.unique(np.concatenate(tokens)) for tail, tokens in heads.items()}


def occurrences(
    breaker: bytes, pieces: VocabularyBytes
) -> tuple[np.ndarray, dict[bytes, np.ndarray]]:
    """Returns the tokens that contain ``breaker``, and those that end with its first bytes.

    The second result is a dict: the other bytes of the breaker -> i32 tokens. All places in the
    vocabulary are compared at once, one more byte in each step.
    """
    text, token_of, ends = pieces
    places = np.flatnonzero(text[:-1] == breaker[0])
    parts = {}
    for n in range(1, len(breaker)):
        tokens = token_of[places]
        is_end = ends[tokens] == places + n
        if is_end.any():
            parts[breaker[n:]] = tokens[is_end]
        places = places[~is_end]
        places = places[text[places + n] == breaker[n]]
    return np.unique(token_of[places]), parts


def tail_tokens(rest: bytes, tokenize: Callable[[str], Sequence[int]]) -> tuple[int, ...] | None:
    """Returns the tokens of ``rest``, the end of a breaker; None if it begins in a character."""
    try:
        return tuple(tokenize(rest.decode()))[:MAX_TAIL_TOKENS]
    except UnicodeDecodeError:
        return None


def dry_penalties(
    recent: np.ndarray, multiplier: float, base: float, allowed_length: int, breakers: Breakers
) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens i64 (m,) and the amounts f32 (m,) to subtract from their logits.

    recent: (n,), the last tokens of the context, oldest first.
    """
    nothing = np.zeros(0, np.int64), np.zeros(0, np.float32)
    if len(recent) <= allowed_length:
        return nothing
    backwards = recent[::-1]
    limit = repetition_limit(backwards, breakers)
    if limit < allowed_length:
        return nothing

    max_exponent = 0
    if base > LEAST_GROWING_BASE:
        max_exponent = int(LOG_FLOAT_MAX / np.log(np.float32(base)))  # in f32, as llama.cpp
    if max_exponent > 0:
        limit = min(limit, allowed_length + max_exponent)  # longer ones are penalised no more
    lengths = repeated_lengths(backwards, limit)  # (n - 1,)
    repeats = np.flatnonzero(lengths >= allowed_length)
    if not len(repeats):
        return nothing
    tokens, which = np.unique(backwards[repeats], return_inverse=True)
    longest = np.zeros(len(tokens), np.int64)
    np.maximum.at(longest, which, lengths[repeats])

    is_breaker = np.isin(tokens, breakers.get((), ()))
    growth = np.power(np.float64(np.float32(base)), longest - allowed_length)
    with np.errstate(over="ignore"):  # an infinite penalty bans the token
        amounts = (np.float64(np.float32(multiplier)) * growth).astype(np.float32)
    return tokens[~is_breaker], amounts[~is_breaker]


def repetition_limit(backwards: np.ndarray, breakers: Breakers) -> int:
    """Returns the number of tokens after the last breaker, or of all tokens without a breaker.

    backwards: the tokens of the context, newest first.
    """
    # place where the last breaker begins, and the length of its tail
    last, longest = len(backwards), 0
    for tail, heads in breakers.items():
        # Places of first tokens that are as new as ``last``, or newer.
        places = np.arange(len(tail), min(last + 1, len(backwards)))
        for n, token in enumerate(tail, 1):
            places = places[backwards[places - n] == token]
        places = places[np.isin(backwards[places], heads)]
        if len(places):
            longest = max(longest, len(tail)) if places[0] == last else len(tail)
            last = int(places[0])
    return last - longest


def repeated_lengths(backwards: np.ndarray, limit: int) -> np.ndarray:
    """For each earlier token, counts the tokens before it that equal the end of the context.

    backwards: the context, newest token first. Entry k belongs to the token backwards[k]. It is the
    number of equal first tokens of backwards[k + 1:] and backwards, at most `limit`. The context "a
    b c a b" gives 2 for c, because "a b" comes before it. All places are compared at once, one more
    token in each step.
    """
    lengths = np.zeros(len(backwards) - 1, np.int64)
    places = np.arange(1, len(backwards))
    n_left = MOST_COMPARED * len(backwards)
    for n in range(limit):
        places = places[places + n < len(backwards)]
        places = places[backwards[places + n] == backwards[n]]
        if not len(places):
            break
        lengths[places - 1] = n + 1
        n_left -= len(places)
        if n_left < 0:
            return np.minimum(common_beginnings(backwards.tolist()), limit)
    return lengths


def common_beginnings(values: Sequence[int]) -> np.ndarray:
    """Returns i64 (n - 1,): how many first values of values[i:] and values are equal, i from 1 on.

    It is Z's algorithm. [1, 2, 1, 2, 3] gives [0, 2, 0, 0].
    """
    n = len(values)
    lengths = [0] * n
    left = right = 0  # values[left:right] is the known match that reaches furthest
    for i in range(1, n):
        length = min(lengths[i - left], right - i) if i < right else 0
        while i + length < n and values[length] == values[i + length]:
            length += 1
        lengths[i] = length
        if i + length > right:
            left, right = i, i + length
    return np.array(lengths[1:], np.int64)
