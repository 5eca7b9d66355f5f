"""``advise``: which method to use for a document."""
