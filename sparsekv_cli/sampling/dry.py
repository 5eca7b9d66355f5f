"""DRY ("don't repeat yourself"): a penalty that grows with the length of the repetition.

A token is penalised when, after it, the end of the context would repeat an earlier passage: with n
tokens already repeated, by multiplier * base**(n - allowed_length). Sequence breakers (line ends,
quotes) stop a repetition from being counted across them. Idea: p-e-w, text-generation-webui pull
request 5677; the details follow llama.cpp (src/llama-sampler.cpp, llama_sampler_dry).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

# First token of a breaker -> the token sequences that may follow it (empty: it is one token).
Breakers = Mapping[int, Sequence[tuple[int, ...]]]

MAX_BREAKER_BYTES = 40  # llama.cpp's MAX_CHAR_LEN and MAX_SEQ_LEN
MAX_TAIL_TOKENS = 20
LOG_FLOAT_MAX = np.float32(88.7228391)  # base**exponent must stay within f32
LEAST_GROWING_BASE = 1.000001


def find_breakers(
    texts: Sequence[str],
    n_vocab: int,
    piece: Callable[[int], str | bytes] | None,
    tokenize: Callable[[str], Sequence[int]] | None,
) -> Breakers:
    """Every token in which a breaker occurs or begins.

    A token that ends in the first bytes of a breaker is paired with the tokens of its other bytes.
    A split inside a character is left out: its rest is no text that could be tokenised.
    """
    if not texts or piece is None:
        return {}
    found: dict[int, list[tuple[int, ...]]] = {}
    breakers = [text.encode()[:MAX_BREAKER_BYTES] for text in texts]
    tails: dict[bytes, tuple[int, ...] | None] = {}
    for token in range(n_vocab):
        word = piece(token)
        word = word.encode() if isinstance(word, str) else word
        for breaker in breakers:
            if breaker in word:
                found.setdefault(token, []).append(())
                continue
            for n_bytes in range(1, min(len(breaker), len(word) + 1)):
                if not word.endswith(breaker[:n_bytes]):
                    continue
                rest = breaker[n_bytes:]
                if rest not in tails:
                    tails[rest] = tail_tokens(rest, tokenize)
                tail = tails[rest]
                if tail is not None and tail not in found.get(token, ()):
                    found.setdefault(token, []).append(tail)
    return found


def tail_tokens(
    rest: bytes, tokenize: Callable[[str], Sequence[int]] | None
) -> tuple[int, ...] | None:
    """Tokens of the end of a breaker; None when it does not begin with a whole character."""
    try:
        text = rest.decode()
    except UnicodeDecodeError:
        return None
    if tokenize is None:
        raise ValueError(f"sequence breaker ending in {text!r}: needs a tokenizer (`tokenize`)")
    return tuple(tokenize(text))[:MAX_TAIL_TOKENS]


def dry_penalties(
    recent: np.ndarray, multiplier: float, base: float, allowed_length: int, breakers: Breakers
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens (m,) i64, amounts (m,) f32) to subtract from the logits.

    recent: (n,) the context that is looked at, oldest first.
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

    is_breaker = np.array([() in breakers.get(int(token), ()) for token in tokens], bool)
    growth = np.power(np.float64(np.float32(base)), longest - allowed_length)
    with np.errstate(over="ignore"):  # an infinite penalty bans the token
        amounts = (np.float64(np.float32(multiplier)) * growth).astype(np.float32)
    return tokens[~is_breaker], amounts[~is_breaker]


def repetition_limit(backwards: np.ndarray, breakers: Breakers) -> int:
    """Tokens after the last sequence breaker; all when there is none. backwards: newest first."""
    if not breakers:
        return len(backwards)
    heads = np.fromiter(breakers.keys(), np.int64, len(breakers))
    for i in np.flatnonzero(np.isin(backwards, heads)):
        lengths = [
            len(tail)
            for tail in breakers[int(backwards[i])]
            if len(tail) <= i and tail == tuple(backwards[i - len(tail) : i][::-1].tolist())
        ]
        if lengths:
            return int(i) - max(lengths)
    return len(backwards)


def repeated_lengths(backwards: np.ndarray, limit: int) -> np.ndarray:
    """(n - 1,) how many tokens before each one, itself not included, equal the context's last.

    Entry k belongs to backwards[k] and counts the matches of backwards[k + 1:] with backwards, at
    most `limit`. Compares all places at once, one token further at each step.
    """
    lengths = np.zeros(len(backwards) - 1, np.int64)
    places = np.arange(1, len(backwards))
    for n in range(limit):
        places = places[places + n < len(backwards)]
        places = places[backwards[places + n] == backwards[n]]
        if not len(places):
            break
        lengths[places - 1] = n + 1
    return lengths
