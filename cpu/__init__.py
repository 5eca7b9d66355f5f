"""Multicore CPU kernels (numba, LLVM vector IR), each with a numpy reference in the same file."""

import os
import sys

from sparsekv_cli.errors import SparseKVError


def _check_environment() -> None:
    """Raises SparseKVError for environment settings of numba that no kernel can work with."""
    refused = {
        "NUMBA_DISABLE_JIT": (lambda n: n != 0, "kernels run compiled only: unset it"),
        "NUMBA_NUM_THREADS": (lambda n: n < 1, "it must be 1 or more: unset it, and use -t"),
    }
    for name, (is_wrong, advice) in refused.items():
        value = os.environ.get(name, "").strip()
        if value.lstrip("+-").isdecimal() and is_wrong(int(value)):
            raise SparseKVError(f"{name} is {value} in the environment: {advice}")
    for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"):
        if name in os.environ:
            value = os.environ[name]
            raise SparseKVError(
                f"{name} is {value!r} in the environment: kernels are made for the CPU that runs "
                "them: unset it"
            )


_check_environment()
os.environ.setdefault("NUMBA_THREADING_LAYER_PRIORITY", "omp tbb workqueue")
# An idle worker of libgomp spins for some tens of microseconds before it sleeps. This covers the
# time between the calls of a decode step. libgomp's default is milliseconds. With it torch's and
# numba's pools wait for each other, and a busy machine costs a scheduler slice at every barrier.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
if "numba" in sys.modules:  # numba has already read these variables
    sys.modules["numba"].config.reload_config()
