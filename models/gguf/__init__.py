"""Reads GGUF files. It limits the memory that it uses, and checks a file before use."""
