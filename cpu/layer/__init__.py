"""A layer around its attention: norms, projections, RoPE, feed-forward; a row or a chunk."""
