"""From a conversation to the tokens of an answer, and from these to its text."""
