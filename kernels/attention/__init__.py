"""Decode attention and exact selection on the GPU."""
