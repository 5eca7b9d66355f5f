"""Launches of kernels/layer/decode.py to compile; see test_compile.py."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from sparsekv_cli.kernels.layer import decode


def launches() -> Iterator[Callable[[], object]]:
    for n in (576, 4096):
        x, weight = torch.zeros(2, n), torch.zeros(n)
        yield partial(decode.rms_norm, x, weight, 1e-5)
        yield partial(decode.rms_norm, x, weight, 1e-5, x)
    yield partial(decode.silu_multiply, torch.zeros(2, 2 * 14336))
    for n_head, n_kv, d in ((32, 8, 128), (32, 32, 128), (9, 3, 64), (6, 2, 80)):
        out = decode.empty_heads(2, n_head, n_kv, d, d, torch.device("cpu"))
        raw, table = torch.zeros(2, (n_head + 2 * n_kv) * d), torch.zeros(64, d // 2)
        pos, norm = torch.zeros(2, dtype=torch.int32), torch.zeros(d)
        biases = torch.zeros(n_head * d), torch.zeros(n_kv * d), torch.zeros(n_kv * d)
        none = (None, None, None)
        scale = torch.zeros(64)
        variants = (
            (biases, (norm, norm), scale, False),
            (none, none[:2], None, True),
            (none, none[:2], scale, True),
        )
        for given, norms, q_scale, interleaved in variants if n_kv == 8 else variants[:1]:
            yield partial(
                decode.split_heads, raw, out, pos, table, table, q_scale, biases=given, norms=norms,
                interleaved=interleaved,
            )  # fmt: skip
