"""Traces of requests for OpenTelemetry: what their spans are, and how a process exports them.

Only `exporting` imports OpenTelemetry, and only a process whose traces are switched on imports that.
"""
