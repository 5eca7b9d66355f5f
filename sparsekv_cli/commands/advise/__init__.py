"""``advise``: which method to take for a document."""
