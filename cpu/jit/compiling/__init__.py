"""How numba compiles kernels, ahead of their calls too, and keeps them on disk."""
