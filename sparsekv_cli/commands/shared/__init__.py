"""The commands share options, prompt, answer, progress and output."""
