"""``chat``: a conversation."""
