"""The KV cache of a layer: rows in memory, what a step reads, what is counted."""
