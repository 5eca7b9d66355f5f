"""SALS on the GPU."""
