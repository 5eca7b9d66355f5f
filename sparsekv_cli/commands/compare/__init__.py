"""``compare``: compares methods on one prompt."""
