"""Perplexity and KLD of texts as llama-perplexity has them, with any method."""
