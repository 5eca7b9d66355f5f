"""A router's choice of experts, and the sum of their outputs, on the GPU."""
