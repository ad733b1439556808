"""Models in one file: `.gguf` holds the config, the tokenizer and the weights."""
