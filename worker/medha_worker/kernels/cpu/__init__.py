"""Attention on CPUs with a kernel compiled at start; optional, plain torch is the fallback."""
