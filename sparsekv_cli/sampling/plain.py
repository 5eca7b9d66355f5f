"""Chains of simple samplers that a device can apply, so that logits do not leave the device."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from sparsekv_cli.sampling.params import Sampler, SamplingParams

PLAIN = ("top_k", "top_p", "min_p", "temperature")  # samplers of a plain chain, in this order only

# The outcome of a sequence's step: logits f32 (n_vocab,), or the token that a device has chosen.
Outcome = np.ndarray | int


class PlainChain(NamedTuple):
    """The parameters of a plain chain: top_k, top_p, min_p and temperature."""

    is_greedy: bool  # True: the most likely token is chosen, and nothing is drawn
    top_k: int  # 0: off
    top_p: float  # 1: off
    min_p: float  # 0: off
    temp: float  # 1: off


def plain_chain(
    params: SamplingParams, active: Sequence[Sampler], takes_best: bool
) -> PlainChain | None:
    """Returns the plain chain of the ``active`` samplers; None if a device cannot apply them.

    takes_best: whether the most likely token is chosen.
    """
    names = [sampler.name for sampler in active]
    if params.logit_bias or params.dynatemp_range > 0:
        return None
    if takes_best:
        return None if names else PlainChain(True, 0, 1.0, 0.0, 1.0)
    if names != [name for name in PLAIN if name in names]:
        return None
    return PlainChain(
        False,
        params.top_k if "top_k" in names else 0,
        params.top_p if "top_p" in names else 1.0,
        params.min_p if "min_p" in names else 0.0,
        params.temp if "temperature" in names else 1.0,
    )


class PlainSampler:
    """A sampler with a plain chain. Called with logits, it chooses a token on the host.

    draw: returns the next random number in [0, 1).
    """

    def __init__(
        self,
        sample: Callable[[np.ndarray, Sequence[int]], int],
        chain: PlainChain,
        draw: Callable[[], float],
    ) -> None:
        self.sample, self.chain, self._draw = sample, chain, draw
        self._ahead: float | None = None

    def __call__(self, logits: np.ndarray, history: Sequence[int]) -> int:
        return self.sample(logits, history)

    def chance(self) -> float:
        """Returns the random number for the next token.

        It stays the same until ``drawn`` is called.
        """
        if self._ahead is None:
            self._ahead = self._draw()
        return self._ahead

    def drawn(self) -> None:
        self._ahead = None
