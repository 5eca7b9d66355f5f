"""Perplexity and KLD of texts, as llama-perplexity measures them, with any method."""
