"""The GPU engine: the decoder and the methods' caches on one GPU and its host."""
