"""DRY ("don't repeat yourself"): a penalty that grows with the length of the repetition.

A token is penalised when, after it, the end of the context would repeat an earlier passage. With n
tokens already repeated the penalty is multiplier * base**(n - allowed_length). Sequence breakers
(line ends, quotes) stop a repetition from being counted across them. Idea: p-e-w,
text-generation-webui pull request 5677; the details follow llama.cpp (src/llama-sampler.cpp,
llama_sampler_dry).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

# The tokens that follow a breaker's first token (empty: the breaker is in one token) -> the ids of
# those first tokens, i32, ascending.
Breakers = Mapping[tuple[int, ...], np.ndarray]

MAX_BREAKER_BYTES = 40  # llama.cpp's MAX_CHAR_LEN and MAX_SEQ_LEN
MAX_TAIL_TOKENS = 20
LOG_FLOAT_MAX = np.float32(88.7228391)  # base**exponent must stay within f32
LEAST_GROWING_BASE = 1.000001
MOST_COMPARED = 64  # tokens of the context, times its length: compared before Z's algorithm


class VocabularyBytes(NamedTuple):
    """The bytes of all tokens of a vocabulary."""

    text: np.ndarray  # u8, one token after another, and one byte more
    token_of: np.ndarray  # i32, the token of each byte
    ends: np.ndarray  # i64 (n_vocab,), where each token's bytes end


def pieces_of(n_vocab: int, piece: Callable[[int], bytes]) -> VocabularyBytes:
    """Returns the bytes of tokens 0 to n_vocab - 1. piece: the bytes of a token."""
    words = [piece(token) for token in range(n_vocab)]
    lengths = [len(word) for word in words]
    text = np.frombuffer(b"".join(words) + b"\0", np.uint8)
    return VocabularyBytes(
        text, np.repeat(np.arange(n_vocab, dtype=np.int32), lengths), np.cumsum(lengths)
    )


def find_breakers(
    texts: Sequence[str], pieces: VocabularyBytes, tokenize: Callable[[str], Sequence[int]]
) -> Breakers:
    """Returns every token in which a breaker occurs or begins.

    A token that ends in the first bytes of a breaker is paired with the tokens of its other bytes.
    A split inside a character is left out, because its rest is no text.
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
    """Returns the tokens that contain a breaker; and by its rest, tokens that end with its start.

    Compares all places at once, one byte further at each step.
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
    """Returns the tokens of a breaker's end; None: it starts within a character."""
    try:
        return tuple(tokenize(rest.decode()))[:MAX_TAIL_TOKENS]
    except UnicodeDecodeError:
        return None


def dry_penalties(
    recent: np.ndarray, multiplier: float, base: float, allowed_length: int, breakers: Breakers
) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens (m,) i64, and amounts (m,) f32 to subtract from their logits.

    recent: (n,) the last tokens of the context, oldest first.
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
    """Returns the tokens after the last breaker; all if there is none. backwards: newest first."""
    last, longest = len(backwards), 0  # where the last breaker begins, and its longest tail
    for tail, heads in breakers.items():
        # Places of a breaker's first token that are as new as the last one found, or newer.
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

    Entry k belongs to backwards[k] and counts the matches of backwards[k + 1:] with backwards, at
    most `limit`. Compares all places at once, one token further at each step.
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
    """Returns (n - 1,): how many values from 1, 2, ... on equal those from 0 on (Z's algorithm)."""
    n = len(values)
    lengths = [0] * n
    left = right = 0  # the part found so far that reaches furthest is values[left:right]
    for i in range(1, n):
        length = min(lengths[i - left], right - i) if i < right else 0
        while i + length < n and values[length] == values[i + length]:
            length += 1
        lengths[i] = length
        if i + length > right:
            left, right = i, i + length
    return np.array(lengths[1:], np.int64)
