"""sparsekv-cli: run GGUF models on long contexts with sparse KV-cache methods."""

__version__ = "0.1.0"
