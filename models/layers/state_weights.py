"""Reads the tensors of a recurrent layer's mixer."""

from typing import Any

import numpy as np

from sparsekv_cli.cache.state import DeltaNet, GatedConvolution, Mamba2, Recurrence
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.gguf.linear import Linear
from sparsekv_cli.models.layers.state_params import StateParams


def read_mixer(
    reader: Any, prefix: str, n_embd: int, params: StateParams, eps: float
) -> dict[str, Any]:
    """Returns the mixer's fields of StateWeights. reader: a ``WeightsReader``."""
    wide, gates, output, recurrence = MIXERS[params.recurrence](reader, prefix, n_embd, params, eps)
    return {
        "wide": wide,
        "gates": gates,
        "o": reader.linear(f"{prefix}{output}", n_embd, params.n_out),
        "recurrence": recurrence,
    }


Mixer = tuple[tuple[Linear, ...], tuple[Linear, ...], str, Recurrence]


def _short_convolution(
    reader: Any, prefix: str, n_embd: int, params: StateParams, eps: float
) -> Mixer:
    wide = (reader.linear(f"{prefix}shortconv.in_proj", 3 * n_embd, n_embd),)
    weight = _filters(reader, f"{prefix}shortconv.conv.weight", params)
    return wide, (), "shortconv.out_proj", GatedConvolution(weight)


def _delta_net(reader: Any, prefix: str, n_embd: int, params: StateParams, eps: float) -> Mixer:
    n_value, d, sizes = params.n_value, params.key_dim, (params.n_mixed, params.n_out)
    per_key = n_value // params.n_key
    if params.grouped and f"{prefix}ssm_in.weight" in reader.file.tensors:  # the older form
        fused = reader.linear(f"{prefix}ssm_in", sum(sizes), n_embd)
        q, k, v, z = _parts(fused, params.n_key, (d, d, per_key * d, per_key * d))
        wide = _of_rows(fused, np.concatenate([q, k, v])), _of_rows(fused, z)
    else:
        wide = tuple(
            reader.linear(f"{prefix}attn_{name}", n, n_embd)
            for name, n in zip(("qkv", "gate"), sizes, strict=True)
        )
    if params.grouped:
        fused = reader.linear(f"{prefix}ssm_ba", 2 * n_value, n_embd)
        parts = _parts(fused, params.n_key, (per_key, per_key))
        gates = tuple(_of_rows(fused, rows) for rows in parts)
    else:
        gates = tuple(reader.linear(f"{prefix}ssm_{name}", n_value, n_embd) for name in GATES)
    recurrence = DeltaNet(
        weight=_filters(reader, f"{prefix}ssm_conv1d.weight", params),
        dt=reader.vector(f"{prefix}ssm_dt.bias", n_value),
        a=_decay(reader, prefix, (n_value,)),
        norm=reader.vector(f"{prefix}ssm_norm.weight", d),
        eps=eps,
        d_k=d,
        grouped=params.grouped,
    )
    return wide, gates, "ssm_out", recurrence


def _mamba2(reader: Any, prefix: str, n_embd: int, params: StateParams, eps: float) -> Mixer:
    n_head, n_out, shape = params.n_value, params.n_out, (params.n_value, 1)
    wide = (reader.linear(f"{prefix}ssm_in", n_out + params.n_mixed + n_head, n_embd),)
    norm, name = np.empty(0, np.float32), f"{prefix}ssm_norm.weight"
    if params.needs_norm or name in reader.file.tensors:
        norm = reader.floats(name, (params.n_key, n_out // params.n_key))
    dt, skip = reader.vector(f"{prefix}ssm_dt.bias", n_head), reader.floats(f"{prefix}ssm_d", shape)
    recurrence = Mamba2(
        weight=_filters(reader, f"{prefix}ssm_conv1d.weight", params),
        bias=reader.vector(f"{prefix}ssm_conv1d.bias", params.n_mixed),
        heads=np.stack([dt, _decay(reader, prefix, shape).reshape(-1), skip.reshape(-1)]),
        norm=norm.reshape(-1),
        eps=eps,
        d_k=params.key_dim,
        d_v=params.value_dim,
    )
    return wide, (), "ssm_out", recurrence


MIXERS = {"short_convolution": _short_convolution, "delta_net": _delta_net, "mamba2": _mamba2}
GATES = ("beta", "alpha")


def _decay(reader: Any, prefix: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns ssm_a, f32 of this shape. Raises SparseKVError if a value is not below 0."""
    a = reader.floats(f"{prefix}ssm_a", shape)
    if not (a < 0).all():
        raise SparseKVError(
            f"{reader.file.path}: tensor {prefix}ssm_a holds values that are not below 0"
        )
    return a


def _parts(fused: Linear, n_key: int, sizes: tuple[int, ...]) -> list[np.ndarray]:
    """Returns the numbers of the rows of each part. Each key head has ``sizes`` rows of the parts.

    With 2 key heads and sizes (1, 2) rows 0, 3 are of the first part, and 1, 2, 4, 5 of the other.
    """
    rows = np.arange(fused.data.shape[0]).reshape(n_key, -1)
    return [part.reshape(-1) for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1)]


def _of_rows(fused: Linear, rows: np.ndarray) -> Linear:
    """Returns a copy of some rows of a matrix."""
    return Linear(fused.code, np.ascontiguousarray(fused.data[rows]), fused.n_columns, None)


def _filters(reader: Any, name: str, params: StateParams) -> np.ndarray:
    """Returns the channels' filters, f32 (length, channels), transposed from the file's layout."""
    filters = reader.floats(name, (params.n_mixed, params.length))
    return np.ascontiguousarray(filters.T)
