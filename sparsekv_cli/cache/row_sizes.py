"""The types of rows of K and V, their sizes in bytes, and a check of the available memory."""

from collections.abc import Iterable
from typing import Protocol

from sparsekv_cli.cache.spec import FULL
from sparsekv_cli.cpu.attention import rows
from sparsekv_cli.errors import LacksMemoryError
from sparsekv_cli.system.memory import available_memory

ROW_ALIGNMENT = 16  # elements; rows of K and V are padded to whole vectors
CACHE_TYPES = {"f16": rows.F16, "q8_0": rows.Q8_0, "q5_1": rows.Q5_1, "q4_0": rows.Q4_0}
FITTING = 256  # tokens; ``fitting_context`` returns a multiple


class Sizes(Protocol):
    """The sizes of a layer: a LayerSpec, or a model's LayerParams."""

    @property
    def n_head_kv(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def source(self) -> int: ...
    @property
    def v_is_k(self) -> bool: ...


def padded(d: int) -> int:
    """Returns ``d`` rounded up to whole vectors: padded(80) is 80, padded(90) is 96."""
    return -(-d // ROW_ALIGNMENT) * ROW_ALIGNMENT


def token_bytes(layers: Iterable[Sizes], cache_type_k: str, cache_type_v: str) -> int:
    """Returns the bytes of one token's K and V in all full layers. Window and state layers count 0.

    If several layers read the same rows, these rows count once.
    """
    owners = (each for each in layers if each.kind == FULL and each.source < 0)
    return sum(layer_bytes(each, cache_type_k, cache_type_v) for each in owners)


def layer_bytes(layer: Sizes, cache_type_k: str, cache_type_v: str) -> int:
    """Returns the bytes of one token's K and V in one layer. If V is K, they count once."""
    k = rows.row_bytes(CACHE_TYPES[cache_type_k], padded(layer.head_dim))
    if layer.v_is_k:
        return layer.n_head_kv * k
    v = rows.row_bytes(CACHE_TYPES[cache_type_v], padded(layer.value_dim))
    return layer.n_head_kv * (k + v)


def fitting_context(n_bytes: int, bytes_a_token: int) -> int:
    """Returns the most tokens whose rows take at most ``n_bytes``, a multiple of FITTING."""
    return max(0, n_bytes) // max(1, bytes_a_token) // FITTING * FITTING


def check_memory(what: str, n_bytes: int, mend: str) -> None:
    """Raises LacksMemoryError if less than ``n_bytes`` of memory are available to this process.

    what: subject of the message, in the plural, as in "K and V of 512 tokens". mend: what the user
    can do about it, as in "shorten the prompt".
    """
    available = available_memory()
    if available is not None and n_bytes > available:
        raise LacksMemoryError(
            f"{what} take {n_bytes / 2**30:.2f} GiB of memory, {available / 2**30:.2f} GiB are "
            f"available: {mend}"
        )
