"""Reads from the metadata which layers are recurrent, and their sizes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparsekv_cli.cpu.recurrent import MAX_HEAD
from sparsekv_cli.models.architectures import Architecture
from sparsekv_cli.models.gguf.keys import ModelKeys

MAX_LENGTH = 64  # limit of a convolution's length
MAX_WIDTH = 1 << 24
MAX_HEADS = 1 << 12
WITHOUT_HEADS = ("short_convolution", "mamba2")  # recurrent layers have a head_count_kv of 0
FULL_ATTENTION_INTERVAL = 4  # qwen35's default


@dataclass(frozen=True)
class StateParams:
    """The sizes of a layer's recurrent part, which replaces attention."""

    recurrence: str  # see Architecture
    length: int  # rows of the convolution's filter
    n_out: int  # elements of the output
    n_key: int = 0  # key heads of a delta net, groups of Mamba-2; 0: only a gated convolution
    n_value: int = 0  # value heads of a delta net, heads of Mamba-2
    key_dim: int = 0  # elements of a key head
    value_dim: int = 0  # elements of a value head
    grouped: bool = False  # see Architecture
    needs_norm: bool = True  # whether the file must have the norm of Mamba-2

    @property
    def n_mixed(self) -> int:
        """The channels of the convolution."""
        return 2 * self.n_key * self.key_dim + self.n_out

    @property
    def n_bytes(self) -> int:
        """The bytes of a state in f32: the last convolution rows, and a matrix per value head."""
        of_heads = self.n_value * self.key_dim * self.value_dim
        return 4 * ((self.length - 1) * self.n_mixed + of_heads)


def read_states(
    keys: ModelKeys,
    architecture: Architecture,
    n_layer: int,
    n_embd: int,
    has_others: Sequence[bool],
) -> list[StateParams | None]:
    """Returns each layer's recurrent part, or None for a layer with attention.

    has_others: whether a layer has KV heads, or is a feed-forward. With short convolutions and with
    Mamba-2 all other layers are recurrent. If attention and Mamba-2 are parallel, all are.
    """
    recurrence = architecture.recurrence
    if not recurrence:
        return [None] * n_layer
    if recurrence == "short_convolution":
        length = keys.integer("shortconv.l_cache", 2, MAX_LENGTH)
        return [None if has else StateParams(recurrence, length, n_embd) for has in has_others]
    length = keys.integer("ssm.conv_kernel", 2, MAX_LENGTH)
    key_dim = keys.integer("ssm.state_size", 1, MAX_HEAD)
    n_key = keys.integer("ssm.group_count", 1, MAX_HEADS)
    n_value = keys.integer("ssm.time_step_rank", 1, MAX_HEADS)
    if n_value % n_key:
        raise keys.fail("ssm.time_step_rank", f"is {n_value}, no multiple of group_count = {n_key}")
    n_out = keys.integer("ssm.inner_size", 1, MAX_WIDTH)
    value_dim = key_dim
    if recurrence == "mamba2":
        value_dim = n_out // n_value
        if n_out % n_value or not 1 <= value_dim <= MAX_HEAD:
            raise keys.fail(
                "ssm.inner_size", f"is {n_out}; each of {n_value} heads must have 1 to {MAX_HEAD}"
            )
    if n_out != n_value * value_dim:
        raise keys.fail("ssm.inner_size", f"is {n_out}; {n_value} heads have {n_value * value_dim}")
    params = StateParams(
        recurrence, length, n_out, n_key, n_value, key_dim, value_dim, architecture.grouped_heads,
        architecture.state_norm,
    )  # fmt: skip
    if recurrence == "mamba2":
        return [None if has and not architecture.parallel else params for has in has_others]
    return [params if is_recurrent else None for is_recurrent in _recurrent(keys, n_layer)]


def _recurrent(keys: ModelKeys, n_layer: int) -> list[bool]:
    """Returns which layers have a delta net: those of the file's list, or all but each n-th."""
    name = "attention.recurrent_layers"
    if name in keys:
        value = keys.get(name)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "biu":
            raise keys.mistyped(name, "an array of bool")
        if len(value) < n_layer:
            raise keys.fail(name, f"has {len(value)} values for {n_layer} layers")
        return [bool(one) for one in value[:n_layer]]
    step = keys.integer("full_attention_interval", 1, MAX_WIDTH, default=FULL_ATTENTION_INTERVAL)
    return [(i + 1) % step != 0 for i in range(n_layer)]
