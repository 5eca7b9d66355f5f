"""The GGUF reader: bounded, checked before use."""
