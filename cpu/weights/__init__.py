"""Quantised weights: the formats as data, and dot products on them."""
