"""The error of a release that is not made."""

from __future__ import annotations


class Refusal(Exception):
    """A release is not made, or is not whole; says why, and what to do."""
