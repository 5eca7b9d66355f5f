"""``eval``: measures perplexity, KLD and RULER's tasks."""
