"""Drafts: guesses of the next tokens of a sequence, which one step checks."""

MOST_DRAFTED = 64  # tokens of a draft
