"""How kernels are compiled: vector IR, addresses, threads, the cache on disk."""
