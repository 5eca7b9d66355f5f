"""The caches on a GPU, a file a method."""
