"""LFPS: history tables, bypass test, search and attention."""
