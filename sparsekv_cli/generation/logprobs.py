"""Log probabilities of an answer's tokens and of the most likely other tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from sparsekv_cli.generation.answer import Answer
    from sparsekv_cli.models.tokenizer.tokenizer import Tokenizer
    from sparsekv_cli.sequence import Sample


class LogProbs:
    """A sampler that keeps log(softmax(logits)) of its choices and of the n most likely tokens.

    These are the model's: neither temperature nor any sampler has changed them.
    """

    def __init__(self, sample: Sample, n: int, tokenizer: Tokenizer) -> None:
        self._sample = sample
        self._n = n
        self._tokenizer = tokenizer
        self._entries: list[dict[str, Any]] = []

    def __call__(self, logits: np.ndarray, history: Sequence[int]) -> int:
        import numpy as np

        token = self._sample(logits, history)
        n = min(self._n, len(logits))
        likely = np.argpartition(-logits, n - 1)[:n] if n else np.zeros(0, np.int64)
        likely = likely[np.lexsort((likely, -logits[likely]))]
        maximum = float(logits.max())
        total = maximum + float(np.log(np.exp(logits - maximum, dtype=np.float64).sum()))
        top = [self._entry(int(each), logits, total) for each in likely]
        self._entries.append({**self._entry(token, logits, total), "top": top})
        return token

    def of(self, answer: Answer) -> list[dict[str, Any]]:
        """Returns an entry for each token of the answer, which began with the first call.

        ``bytes`` are the token's own; its text replaces a part of a character.
        """
        return self._entries[: len(answer.tokens)]

    def since(self, n: int) -> list[dict[str, Any]]:
        """Returns the entries after the first n."""
        return self._entries[n:]

    def _entry(self, token: int, logits: np.ndarray, total: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        text = data.decode("utf-8", errors="replace")
        logprob = float(logits[token]) - total
        return {"id": token, "token": text, "bytes": list(data), "logprob": logprob}
