"""The inputs of a layer's cache: its sizes, the new rows, and the budget of a step.

Letters in shapes: T new rows, H query heads, G kv heads, d head size, n rows of context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from sparsekv_cli.settings.option import MAX_WHOLE

N_SINKS = 4  # the first tokens; every step attends to them
FULL = "full"  # the kind of layers that attend to all rows, and that methods change
WINDOW = "window"  # the kind of layers that attend to the last rows
N_SPARE = 128  # rows kept before a window, so that the last 128 steps can always be undone
N_STEPS = 128  # decode steps after which a window layer's rows move to the start of their memory
STATE = "state"  # the kind of recurrent layers
N_CHECKPOINTS = 8  # default of LayerSpec.n_checkpoints
NO_SINKS = np.empty(0, np.float32)


def window_rows(window: int) -> int:
    """Returns the number of rows for which a window layer has memory."""
    return window + N_SPARE + N_STEPS


class AttnInput(NamedTuple):
    """Queries, keys and values of T new rows of one sequence in one layer.

    Prefill: (heads, T, d), arrays of f32 or bf16 (cpu/jit/floats.py), or tensors on a device.
    Decode (T = 1): f32 views (heads, 1, d padded to 16), valid during the call only.
    """

    q: Any  # (H, T, d), rotated
    k: Any  # (G, T, d), rotated
    v: Any  # (G, T, d_v)
    q_nope: Any  # (H, T, d), before RoPE (after bias and q/k norm)
    k_nope: Any  # (G, T, d)
    # position of the first row, or int64 (T,), one for each row (models/reuse/repair.py)
    pos: Any


class StateInput(NamedTuple):
    """Inputs of T new rows of one sequence in a recurrent layer: f32, or bf16 in a prefill."""

    rows: Any  # (T, width), projections for the layer's convolution and output gate
    gates: Any  # (T, 2 heads), factors of the old state and of its change; or (T, 0)


@dataclass(frozen=True)
class LayerSpec:
    """The sizes and constants of one layer, and the number of its kernels' threads."""

    layer: int
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    value_dim: int
    n_threads: int
    # f64 (n_rot/2,), the angle of each RoPE pair (i, i + n_rot/2) for one position; empty: no
    # rotation
    theta: np.ndarray = field(default_factory=lambda: np.empty(0), compare=False)
    rope_scale: float = 1.0  # factor of the rotated dims (YaRN's magnitude)
    # arrays that the method's calibration has for this layer, by name; empty: it needs none
    calibration: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)
    cache_type_k: str = "f16"  # type of the rows of K (cache/store.py)
    cache_type_v: str = "f16"  # type of the rows of V
    attention_scale: float = 0.0  # the softmax's factor; 0: 1/sqrt(d)
    softcap: np.float32 = np.float32(0)  # c of scores c tanh(score / c); 0: none
    # f32 (H,), for each head a score that only adds to the softmax's sum; or empty
    sinks: np.ndarray = field(default_factory=lambda: NO_SINKS, compare=False)
    kind: str = FULL  # the kind of the layer's cache (cache/kinds.py)
    window: int = 0  # last rows that a query attends to, its own included; 0: all
    # what a recurrent layer computes (cache/state.py)
    recurrence: Any = field(default=None, compare=False)
    n_checkpoints: int = N_CHECKPOINTS  # the most checkpoints that a recurrent layer keeps
    source: int = -1  # the earlier layer whose rows this one reads; -1: it has its own
    # A token has one row, which is its key and its value: latent attention. The values' rotated
    # dims mean nothing.
    v_is_k: bool = False
    shares_input: bool = False  # whether its input is that of the layer before it
    n_full: int = 0  # number of full layers in the model
    full_place: int = 0  # number of full layers before this one

    @property
    def group(self) -> int:
        """The number of query heads that read one kv head."""
        return self.n_head // self.n_head_kv

    @property
    def scale(self) -> np.float32:
        """The factor of q . k in the softmax."""
        return np.float32(self.attention_scale or self.head_dim**-0.5)

    @property
    def n_chunk(self) -> int:
        """The number of pairs of dims (i, i + n_chunk): RoPE's pairs, or d/2 without RoPE."""
        return len(self.theta) or self.head_dim // 2


@dataclass(frozen=True)
class Memory:
    """Bytes of one layer's cache on the host, on the device, and of the method's index."""

    host: int = 0
    device: int = 0
    index: int = 0


@dataclass(frozen=True)
class Budget:
    """The most rows that a step attends to: a number, ``512``, or a share of the context, ``5%``.

    Default budgets have a floor and a ceiling. The floor keeps short chats coherent. The ceiling
    limits the work of a step. A share that the user gives has neither.
    """

    tokens: int | None = None  # rows, if the budget is a number
    share: float | None = None  # rows divided by the context's rows, in (0, 1]
    floor: int = 1  # least rows of a share
    ceiling: int = 1 << 62  # most rows of a share
    sparse_from: int = 0  # contexts up to this length are dense (methods/depth.py)

    @staticmethod
    def parse(text: str) -> Budget:
        """Returns the budget that ``text`` names, such as 5%. Raises ValueError for other texts."""
        wrong = ValueError(
            f"budget = {text[:40]!r}: must be from 1 to {MAX_WHOLE} tokens, or a share up "
            "to 100% such as 5%"
        )
        try:
            if text.endswith("%"):
                share = float(text[:-1]) / 100
                if not 0 < share <= 1:
                    raise wrong
                return Budget(share=share)
            if not 1 <= int(text) <= MAX_WHOLE:
                raise wrong
            return Budget(tokens=int(text))
        except ValueError:
            raise wrong from None

    def rows(self, n: int) -> int:
        """Returns the most rows that a step attends to in a context of n rows, at least 1.

        5% of 1000 rows are 50. The default budget has a floor of 64 rows, so it returns 64.
        """
        if 0 < n <= self.sparse_from:
            return n
        if self.tokens is not None:
            return self.tokens
        assert self.share is not None
        return min(self.ceiling, max(self.floor, round(self.share * n)))

    def at_least(self, n: int) -> Budget:
        """Returns this budget, raised to at least n rows."""
        if self.tokens is not None:
            return replace(self, tokens=max(self.tokens, n))
        return replace(self, floor=max(self.floor, n), ceiling=max(self.ceiling, n))

    def __str__(self) -> str:
        if self.share is None:
            return str(self.tokens)
        limits = f" ({self.floor} to {self.ceiling} rows)" if self.floor > 1 else ""
        return f"{100 * self.share:g}%{limits}"


DEFAULT_BUDGET = Budget(share=0.05, floor=64, ceiling=512)


def parse_layers(text: str) -> tuple[int, ...]:
    """Returns the layer numbers in ``text``: "0,-1" gives (0, -1), "none" and "" give ().

    Negative numbers count from the last layer. Raises ValueError for other texts.
    """
    if text.strip() in ("", "none"):
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"dense_layers = {text!r}: must be layer numbers such as 0,1 or -1, or none"
        ) from None
