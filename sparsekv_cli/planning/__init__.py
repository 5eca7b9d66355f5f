"""Measures speed and memory of a model on this machine, and chooses a method by them."""
