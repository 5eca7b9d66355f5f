"""Measures what methods need to know about a model, once a model, and stores it in a file."""
