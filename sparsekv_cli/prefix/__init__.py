"""Rows of prompts on disk, which a later prompt with the same beginning reuses."""
