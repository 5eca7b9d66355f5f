"""Rows of prompts on disk, so that a later prompt that begins alike need not compute them."""
