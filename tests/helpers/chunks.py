"""A chunk of a prefill as the CPU's decoder hands it to a layer."""

import numpy as np

from sparsekv_cli.cache.attend import attend_causal
from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.spec import AttnInput


def attend_chunk(cache: LayerCache, x: AttnInput) -> np.ndarray:
    """Adds a chunk's rows to a cache; their dense attention (H, T, d_v)."""
    return attend_causal(x.q, cache.extend(x), cache.spec)
