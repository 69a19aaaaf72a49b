"""Paths that probes ask, every few seconds and without a key."""

PROBE_PATHS = ("/health", "/ready", "/accepting")
