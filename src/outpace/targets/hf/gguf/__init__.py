"""Models in GGUF files: their header, configuration, tokenizer and weights."""
