"""Model directories: what may be served, their tokenizers, and small ones that Medha makes itself."""
