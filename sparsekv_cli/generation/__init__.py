"""The way from a conversation to the tokens of an answer, and from the tokens to its text."""
