"""FASA on the GPU."""
