"""Page summaries and scores on the GPU."""
