"""``chat``: holds a conversation."""
