"""``inspect``: what a file holds."""
