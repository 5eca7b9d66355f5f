"""RULER's tasks (NVIDIA/RULER), generated offline with texts of our own, and their scores."""
