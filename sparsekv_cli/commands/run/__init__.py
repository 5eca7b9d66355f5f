"""``run``: one completion, or a file of them."""
