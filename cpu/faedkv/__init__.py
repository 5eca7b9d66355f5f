"""FAEDKV: attention over a transformed segment."""
