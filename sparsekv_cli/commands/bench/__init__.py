"""``bench``: measures speed."""
