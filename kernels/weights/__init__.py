"""Quantised weights on the GPU."""
