"""Converts text to token ids, and token ids to text."""
