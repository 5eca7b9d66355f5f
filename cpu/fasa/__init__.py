"""FASA: dominant frequency chunks of keys."""
