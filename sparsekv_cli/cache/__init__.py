"""The KV cache of a layer: its rows in memory, its attention in a step, its counts."""
