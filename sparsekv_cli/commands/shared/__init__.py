"""Code of several commands: prompt, answer, progress and output."""
