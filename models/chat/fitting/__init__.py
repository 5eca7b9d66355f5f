"""Gives each chat template a conversation in a form that it accepts."""
