"""Gives each chat template the conversation in a form that the template accepts."""
