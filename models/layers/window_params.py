"""Reads which layers have a window, and which layers read the K and V of other layers."""

import numpy as np

from sparsekv_cli.models.architectures import Architecture, Windows
from sparsekv_cli.models.gguf.keys import MAX_TOKENS, ModelKeys


def read_windows(keys: ModelKeys, windows: Windows | None, n_layer: int) -> tuple[int, ...]:
    """Returns the window of each layer in tokens; 0: the layer attends to all tokens.

    The file states a flag for each layer, or a period. The last layer of a period has no window.
    """
    name, pattern = "attention.sliding_window", "attention.sliding_window_pattern"
    size = 0 if windows is None else keys.integer(name, 0, MAX_TOKENS, default=windows.size)
    if windows is None or not size or windows.n_layer not in (0, n_layer):
        return (0,) * n_layer
    flags = keys.get(pattern) if pattern in keys else windows.step
    if isinstance(flags, np.ndarray):
        if len(flags) != n_layer:
            raise keys.fail(pattern, f"has {len(flags)} values for {n_layer} layers")
        return tuple(size if flag else 0 for flag in flags.tolist())
    if isinstance(flags, bool) or not isinstance(flags, int) or flags < 0:
        raise keys.fail(pattern, "must be a whole number, or a flag for each layer")
    return tuple(0 if flags and i % flags == flags - 1 else size for i in range(n_layer))


def read_sources(
    keys: ModelKeys, architecture: Architecture, windows: tuple[int, ...]
) -> tuple[int, ...]:
    """Returns for each layer the layer whose K and V it reads; -1: its own.

    The last layers may have none. Each of them reads the rows of the last own layer of its kind.
    """
    n_layer, n_shared, name = len(windows), 0, "attention.shared_kv_layers"
    if architecture.layer_inputs:
        n_shared = keys.integer(name, 0, n_layer, default=0)
    n_own = n_layer - n_shared
    if not n_shared:
        return (-1,) * n_layer
    if n_own < 2 or not windows[n_own - 2] or windows[n_own - 1]:
        raise keys.unsupported(
            name, f"is {n_shared} of {n_layer} layers: the last two others must be a window "
            "layer and a full one",
        )  # fmt: skip
    return tuple(-1 if i < n_own else n_own - 1 - bool(windows[i]) for i in range(n_layer))
