"""Copies of arrays within kernels.

numba checks the shapes of ``to[:] = values`` and writes both into a message. The check takes a
second to compile, for each pair of types. These loops check nothing.
"""

from sparsekv_cli.cpu.jit.kernel import njit


@njit(cache=True, nogil=True)
def put(to, values):
    """to[i] = values[i] for all i < len(to). Both have one dim."""
    for i in range(len(to)):
        to[i] = values[i]


@njit(cache=True, nogil=True)
def put_scaled(to, values, scale):
    """to[i, j] = values[i, j] scale for all places of ``to``."""
    for i in range(to.shape[0]):
        for j in range(to.shape[1]):
            to[i, j] = values[i, j] * scale
