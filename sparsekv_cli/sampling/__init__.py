"""llama.cpp's sampler chain."""
