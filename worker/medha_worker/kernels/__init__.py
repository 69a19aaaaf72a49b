"""The operators of a model behind one protocol, and their implementations by name: `flashinfer`, `cpu` and `torch`."""
