"""``compare``: methods on one prompt."""
