"""Experts: a router, and the feed-forward layers that it chooses for each row."""
