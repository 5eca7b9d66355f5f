"""Triton kernels for the GPU; same file and function names as ``cpu``."""

import os

# Products and sums become one instruction; Triton 3.10 would no longer do so by itself.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
