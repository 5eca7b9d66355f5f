"""GGUF reader, hyper-parameters, weights, decoder, tokenizer and chat template."""
