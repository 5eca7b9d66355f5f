"""``run``: generates one answer, or the answers to a file of prompts."""
