"""``inspect``: shows what is in a model file."""
