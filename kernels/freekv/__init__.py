"""FreeKV on the GPU."""
