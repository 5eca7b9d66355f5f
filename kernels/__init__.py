"""Triton kernels for the GPU. Files and functions have the same names as in ``cpu``."""

import os

# A product and a sum become one instruction. Without this, Triton 3.10 does not fuse them.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
