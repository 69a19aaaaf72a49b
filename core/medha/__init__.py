"""The decisions of Medha: pure functions and state machines, without I/O, clock or torch."""

__version__ = "0.1.0"
