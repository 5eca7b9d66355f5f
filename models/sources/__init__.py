"""Finds models by name: in the user's folder, the Hugging Face hub's cache and packages."""
