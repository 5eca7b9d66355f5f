"""``eval``: perplexity, KLD and RULER."""
