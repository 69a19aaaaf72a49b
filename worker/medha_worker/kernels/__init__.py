"""Attention and row operators of a model, in plain torch or compiled for this machine."""
