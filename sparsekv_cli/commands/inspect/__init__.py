"""``inspect``: shows the contents of a file."""
