"""A layer without its attention: norms, projections, RoPE, feed-forward; for rows and chunks."""
