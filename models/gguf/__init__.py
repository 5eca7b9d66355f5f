"""The GGUF reader. It bounds its memory and checks a file before use."""
