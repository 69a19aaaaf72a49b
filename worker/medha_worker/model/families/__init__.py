"""The families of models that are served: one short file of declarations for each, beside their common form."""
