"""Distributes work to several machines by Ray: each opens the same model and gets shards."""
