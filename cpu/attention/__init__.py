"""Attention over stored rows: exact, selected, causal; and exact selection."""
