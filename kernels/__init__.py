"""Triton kernels for the GPU; same file and function names as ``cpu``."""
