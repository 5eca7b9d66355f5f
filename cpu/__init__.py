"""Multicore CPU kernels (numba, LLVM vector IR), each with a numpy reference beside it."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("NUMBA_THREADING_LAYER_PRIORITY", "omp tbb workqueue")
# How long an idle worker of libgomp spins before it sleeps: some tens of microseconds bridge the
# calls of a decode step. libgomp's own default, milliseconds, makes torch's and numba's pools wait
# for each other in prefill, and costs a scheduler slice at every barrier when the machine is busy.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
if "numba" in sys.modules:  # which has read these already
    sys.modules["numba"].config.reload_config()
