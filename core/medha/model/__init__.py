"""Served models: the shapes of their layers, the formats of their numbers, and the fields of their configuration."""
