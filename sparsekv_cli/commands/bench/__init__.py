"""``bench``: speed."""
