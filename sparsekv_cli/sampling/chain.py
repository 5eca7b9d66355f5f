"""Chooses the next token: llama.cpp's sampler chain, as functions from candidates to candidates.

Each function does what the sampler of that name does in llama.cpp (src/llama-sampler.cpp) with
min_keep 0. Where llama.cpp's result is random or undefined, this module's is not. The lowest token
id of equal logits comes first. typ_p ignores tokens of probability zero. Draws come from PCG64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.sampling.dry import Breakers, dry_penalties
from sparsekv_cli.sampling.params import SAMPLERS, Sampler, SamplingParams
from sparsekv_cli.sampling.plain import PlainSampler, plain_chain

BLOCK = 128  # logits of a block, when the largest few are searched
FIRST_SORTED = 256  # tokens that top_p sorts at first


class Candidates(NamedTuple):
    """The tokens that the chain may still choose."""

    ids: np.ndarray  # i64 (n,)
    logits: np.ndarray  # f32 (n,)
    n_vocab: int  # number of tokens of the vocabulary
    is_sorted: bool = False  # the logits descend
    is_full: bool = False  # ``ids`` are 0 .. n - 1 in order

    def keep(self, index: np.ndarray | slice, *, is_sorted: bool) -> Candidates:
        """Returns the candidates at the places `index`, in the order of `index`."""
        return Candidates(self.ids[index], self.logits[index], self.n_vocab, is_sorted)

    def locate(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns which of m distinct tokens are candidates, bool (m,), and the places of those.

        With ids [3, 5, 9], tokens [9, 4] give [True, False] and places [2].
        """
        if self.is_full:
            found = (tokens >= 0) & (tokens < len(self.ids))
            return found, tokens[found]
        order = np.argsort(self.ids, kind="stable")  # fast where they ascend already
        at = order[np.minimum(np.searchsorted(self.ids, tokens, sorter=order), len(order) - 1)]
        found = self.ids[at] == tokens
        return found, at[found]


class Follows(Protocol):
    """Tells which tokens may follow in an answer."""

    def allowed(self, n_vocab: int) -> np.ndarray | None:
        """Returns the ids that may follow, i64 (n,), ascending, below n_vocab; None: all ids."""

    def accept(self, token: int) -> None:
        """Adds ``token``, one of the allowed ones, to the answer."""


Sample = Callable[[np.ndarray, Sequence[int]], int]
ChainStep = Callable[[Candidates, Sequence[int]], Candidates]


def make_sampler(
    params: SamplingParams,
    *,
    find_breakers: Callable[[tuple[str, ...]], Breakers] | None = None,
    constraint: Follows | None = None,
) -> Sample:
    """Returns a function (logits f32 (V,), history) -> token id. history: prompt and answer.

    find_breakers: finds DRY's sequence breakers in the vocabulary (dry.find_breakers). It is called
    only if DRY is on and has breakers. constraint: the form of the answer. The chain ignores tokens
    that it does not allow, and it gets every chosen token. The same parameters and the same calls
    give the same tokens, unless params.seed is -1.

    Raises ValueError if DRY needs ``find_breakers`` and it is missing. The function raises
    SparseKVError if the logits have a NaN, or if no token may be chosen. It does not change the
    logits.
    """
    rng = np.random.Generator(np.random.PCG64(None if params.seed == -1 else params.seed))
    table = {sampler.name: sampler for sampler in SAMPLERS}
    active = [table[name] for name in params.samplers if table[name].is_on(params)]
    is_greedy = params.temp <= 0 and params.dynatemp_range == 0
    takes_best = is_greedy and table["temperature"] in active
    while takes_best and active and active[-1].keeps_best:
        active.pop()
    steps = [chain_step(sampler, params, rng, find_breakers) for sampler in active]
    ids, biased = np.arange(0), np.fromiter(params.logit_bias, np.int64)
    amounts = np.fromiter(params.logit_bias.values(), np.float32)

    def sample(logits: np.ndarray, history: Sequence[int]) -> int:
        nonlocal ids
        if len(ids) != len(logits):
            ids = np.arange(len(logits))
        candidates = Candidates(ids, np.asarray(logits, np.float32), len(logits), is_full=True)
        candidates = add_bias(candidates, biased, amounts)
        if constraint is not None:
            allowed = constraint.allowed(len(logits))
        if constraint is not None and allowed is not None:
            candidates = Candidates(allowed, candidates.logits[allowed], len(logits))
        check_finite(candidates.logits.max())
        for step in steps:
            candidates = step(candidates, history)
        token = best(candidates) if takes_best else draw(candidates, rng.random())
        if constraint is not None:
            constraint.accept(token)
        return token

    plain = None if constraint is not None else plain_chain(params, active, takes_best)
    if plain is None:
        return sample
    return PlainSampler(sample, plain, lambda: 0.0 if takes_best else rng.random())


def chain_step(
    sampler: Sampler,
    params: SamplingParams,
    rng: np.random.Generator,
    find_breakers: Callable[[tuple[str, ...]], Breakers] | None,
) -> ChainStep:
    """Returns the function of one sampler with its parameters filled in."""
    function, values = FUNCTIONS[sampler.name], sampler.values(params)
    if sampler.takes == "vocabulary":
        n_last, *others = values
        texts = params.dry_sequence_breakers
        if texts and find_breakers is None:
            raise ValueError(f"dry_sequence_breakers = {texts!r}: need a vocabulary")
        breakers = find_breakers(texts) if texts and find_breakers is not None else {}
        return lambda candidates, history: function(
            candidates, last(history, n_last), *others, breakers
        )
    if sampler.takes == "history":
        n_last, *others = values
        return lambda candidates, history: function(candidates, last(history, n_last), *others)
    if sampler.takes == "chance":
        return lambda candidates, _: function(candidates, *values, rng.random())
    return lambda candidates, _: function(candidates, *values)


def last(history: Sequence[int], n_last: int) -> np.ndarray:
    """Returns the last n_last tokens of the history, i64 (n,); the whole history for -1."""
    return np.asarray(history if n_last == -1 else history[-n_last:], dtype=np.int64)


def add_bias(candidates: Candidates, tokens: np.ndarray, amounts: np.ndarray) -> Candidates:
    """Adds amounts f32 (m,) to the logits of tokens i64 (m,).

    Raises SparseKVError for an id outside the vocabulary.
    """
    if not len(tokens):
        return candidates
    found, index = candidates.locate(tokens)
    if not found.all():
        raise SparseKVError(
            f"logit bias for token {tokens[~found][0]}: the vocabulary has {len(candidates.ids)}"
        )
    logits = candidates.logits.copy()
    logits[index] += amounts
    return candidates._replace(logits=logits, is_sorted=False)


def penalties(
    candidates: Candidates, recent: np.ndarray, repeat: float, frequency: float, presence: float
) -> Candidates:
    """Lowers the logits of the tokens in ``recent`` (n,), which includes the prompt.

    A positive logit is divided by `repeat`, others are multiplied by it, so both fall. Then count *
    frequency + presence is subtracted. Each distinct token is penalised once.
    """
    tokens, counts = np.unique(recent, return_counts=True)
    found, index = candidates.locate(tokens)
    logits = candidates.logits.copy()
    old = logits[index]
    new = np.where(old <= 0, old * np.float32(repeat), old / np.float32(repeat))
    amount = counts[found].astype(np.float32) * np.float32(frequency) + np.float32(presence)
    logits[index] = new - amount
    return candidates._replace(logits=logits, is_sorted=False)


def dry(
    candidates: Candidates,
    recent: np.ndarray,
    multiplier: float,
    base: float,
    allowed_length: int,
    breakers: Breakers,
) -> Candidates:
    """Lowers the logits of tokens that would repeat earlier text (sampling/dry.py)."""
    return subtract(candidates, *dry_penalties(recent, multiplier, base, allowed_length, breakers))


def subtract(candidates: Candidates, tokens: np.ndarray, amounts: np.ndarray) -> Candidates:
    """Subtracts amounts f32 (m,) from the logits of distinct tokens (m,)."""
    if not len(tokens):
        return candidates
    found, index = candidates.locate(tokens)
    logits = candidates.logits.copy()
    logits[index] -= amounts[found]
    return candidates._replace(logits=logits, is_sorted=False)


def top_n_sigma(candidates: Candidates, n: float) -> Candidates:
    """Keeps logits from maximum - n sigma on. sigma: standard deviation of the finite logits."""
    logits = candidates.logits
    if len(logits) <= 1:
        return candidates
    finite = logits if np.isfinite(logits.min()) else logits[logits != -np.inf]
    if not len(finite):
        return candidates
    bound = logits.max() - np.float32(n) * finite.std()
    return candidates.keep(np.flatnonzero(logits >= bound), is_sorted=candidates.is_sorted)


def top_k(candidates: Candidates, k: int) -> Candidates:
    """Returns the candidates with the k largest logits, sorted; all, if there are at most k."""
    if candidates.is_sorted:
        return candidates.keep(slice(k), is_sorted=True)
    index = at_least_largest(candidates.logits, k)
    order = np.argsort(-candidates.logits[index], kind="stable")[:k]
    return candidates.keep(index[order], is_sorted=True)


def at_least_largest(logits: np.ndarray, k: int) -> np.ndarray:
    """Returns ascending places of the k largest logits and of a few others.

    Each of the k blocks with the largest maxima has a logit that reaches the k-th largest maximum.
    So at least k logits reach it, and the k largest logits are among them. This takes one pass for
    the maxima and one pass to compare.
    """
    n_blocks = len(logits) // BLOCK
    if n_blocks <= 2 * k:
        return np.arange(len(logits))
    maxima = logits[: n_blocks * BLOCK].reshape(n_blocks, BLOCK).max(axis=1)
    bound = np.partition(maxima, n_blocks - k)[n_blocks - k]
    return np.flatnonzero(logits >= bound)


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Returns softmax in f32, (n,) -> (n,)."""
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def typical(candidates: Candidates, p: float) -> Candidates:
    """Locally typical sampling: keeps the tokens nearest to the entropy until their mass exceeds p.

    A token's distance is | -log(probability) - entropy |.
    """
    mass = probabilities(candidates.logits)
    candidates, mass = candidates.keep(mass > 0, is_sorted=candidates.is_sorted), mass[mass > 0]
    surprise = -np.log(mass)
    order = np.argsort(np.abs(surprise - np.sum(mass * surprise)), kind="stable")
    total = np.cumsum(mass[order])
    n_kept = int(np.searchsorted(total, np.float32(p), side="right")) + 1
    return candidates.keep(order[:n_kept], is_sorted=False)


def top_p(candidates: Candidates, p: float) -> Candidates:
    """Keeps the most likely tokens until their mass reaches p; at least one token.

    Usually FIRST_SORTED tokens are enough. Otherwise all logits are sorted, without their ids.
    """
    logits = candidates.logits
    maximum = logits.max()
    total = np.sum(np.exp(logits - maximum))
    head = top_k(candidates, min(FIRST_SORTED, len(logits)))
    mass = np.cumsum(np.exp(head.logits - maximum) / total)
    if mass[-1] >= np.float32(p) or len(head.ids) == len(logits):
        return head.keep(slice(first_reaching(mass, p) + 1), is_sorted=True)
    descending = logits if candidates.is_sorted else -np.sort(-logits)
    mass = np.cumsum(np.exp(descending - maximum) / total)
    n_kept = min(first_reaching(mass, p) + 1, len(logits))
    above = np.flatnonzero(logits > descending[n_kept - 1])
    equal = np.flatnonzero(logits == descending[n_kept - 1])[: n_kept - len(above)]
    index = np.sort(np.concatenate([above, equal]))
    return candidates.keep(index, is_sorted=candidates.is_sorted)


def first_reaching(mass: np.ndarray, p: float) -> int:
    """Returns the index of the first value >= p in ``mass`` (n,), which rises; n if none is."""
    return int(np.searchsorted(mass, np.float32(p), side="left"))


def min_p(candidates: Candidates, p: float) -> Candidates:
    """Keeps tokens that are at least p times as likely as the most likely token."""
    bound = candidates.logits.max() + np.log(np.float32(p))
    index = np.flatnonzero(candidates.logits >= bound)
    return candidates.keep(index, is_sorted=candidates.is_sorted)


def xtc(candidates: Candidates, probability: float, threshold: float, chance: float) -> Candidates:
    """Excludes the top choices but the last one: tokens with a probability >= threshold.

    With probabilities .5, .3, .2 and threshold .25, the token with .5 is excluded. chance: a number
    in [0, 1); above `probability` nothing is excluded.
    """
    if chance > probability or len(candidates.ids) < 2:
        return candidates
    candidates = top_k(candidates, len(candidates.ids))
    mass = probabilities(candidates.logits)
    n_top = int(np.count_nonzero(mass >= np.float32(threshold)))
    return candidates.keep(slice(max(0, n_top - 1), None), is_sorted=True)


def temperature(
    candidates: Candidates, temp: float, spread: float = 0.0, exponent: float = 1.0
) -> Candidates:
    """Divides the logits by temp; for temp <= 0 it keeps only the most likely token.

    spread: above 0, the temperature lies between temp - spread and temp + spread. Its place between
    them is (entropy / largest entropy) ^ ``exponent``.
    """
    if spread > 0:
        if len(candidates.ids) < 2:
            return candidates
        mass = probabilities(candidates.logits)
        mass = mass[mass > 0]
        share = -np.sum(mass * np.log(mass)) / np.log(np.float32(len(candidates.ids)))
        lowest = max(0.0, temp - spread)
        temp = lowest + (temp + spread - lowest) * float(share) ** exponent
    if temp <= 0:
        index = int(np.argmax(candidates.logits))
        return candidates.keep(slice(index, index + 1), is_sorted=True)
    return candidates._replace(logits=candidates.logits / np.float32(temp))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "penalties": penalties,
    "dry": dry,
    "top_n_sigma": top_n_sigma,
    "top_k": top_k,
    "typ_p": typical,
    "top_p": top_p,
    "min_p": min_p,
    "xtc": xtc,
    "temperature": temperature,
}


def best(candidates: Candidates) -> int:
    """Returns the id of the most likely token; of equal ones, the lowest id."""
    index = int(np.argmax(candidates.logits))
    check_finite(candidates.logits[index])
    return int(candidates.ids[index])


def draw(candidates: Candidates, chance: float) -> int:
    """Returns a token drawn from softmax(logits). chance: a number in [0, 1).

    With probabilities .5, .3, .2, a chance of .6 gives the second token.
    """
    maximum = candidates.logits.max()
    check_finite(maximum)
    total = np.cumsum(np.exp(candidates.logits - maximum), dtype=np.float64)
    index = np.searchsorted(total, chance * total[-1], side="right")
    last_possible = np.searchsorted(total, total[-1], side="left")
    return int(candidates.ids[min(index, last_possible)])


def check_finite(maximum: np.float32) -> None:
    """Raises SparseKVError if the highest logit is NaN or infinite."""
    if not np.isfinite(maximum):
        raise SparseKVError(
            f"the highest logit is {maximum}, expected a finite number: the weights are damaged,"
            " or every token is banned by a logit bias or by the grammar with one"
        )
