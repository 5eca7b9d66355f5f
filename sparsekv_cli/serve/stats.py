"""What the scheduler has done so far, as numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

N_KEPT = 10_000  # times that wait for the next look of the metrics


@dataclass
class Stats:
    """Counts since the start; times in seconds."""

    kv_limit: int
    kv_bytes: int = 0  # of all sequences
    prompt_tokens: int = 0  # that were computed
    cached_tokens: int = 0  # of prompts, whose rows were there
    generated_tokens: int = 0
    rows_total: int = 0
    rows_attended: int = 0
    n_answers: int = 0
    n_failed: int = 0
    n_aborted: int = 0
    n_steps: int = 0
    step_s: float = 0.0
    step_tokens: int = 0
    first_token_s: deque[float] = field(default_factory=lambda: deque(maxlen=N_KEPT))

    def add_step(self, n_tokens: int, seconds: float) -> None:
        self.n_steps += 1
        self.step_tokens += n_tokens
        self.step_s += seconds

    def add_answer(self, n_tokens: int, ledger: Mapping[str, int]) -> None:
        self.n_answers += 1
        self.generated_tokens += n_tokens
        self.rows_total += ledger["rows_total"]
        self.rows_attended += ledger["rows_attended"]
