"""Code that several commands use: prompts, answers, progress and output."""
