"""Attention on CPUs by a kernel compiled at start; optional, plain torch stands in."""
