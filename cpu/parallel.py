"""How kernels use threads: explicit prange loops only.

By default numba's parallel=True also turns every array expression and allocation into a parallel
loop of its own, each of which costs a start of the thread pool. The loops run on pool.py's threads.
"""

from sparsekv_cli.cpu import pool

pool.install()

PRANGE_ONLY = {
    "prange": True,
    "comprehension": False,
    "fusion": False,
    "inplace_binop": False,
    "numpy": False,
    "reduction": False,
    "setitem": False,
    "stencil": False,
}
