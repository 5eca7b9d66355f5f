"""Latent attention (MLA): its queries, rows and values, for chunks and decode steps."""
