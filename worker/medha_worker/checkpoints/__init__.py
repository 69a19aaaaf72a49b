"""Model directories: checks of what can be served, tokenizers, and small checkpoints made by Medha."""
