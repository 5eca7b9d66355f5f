"""RULER's tasks (NVIDIA/RULER), generated offline in texts of our own, and their scores."""
