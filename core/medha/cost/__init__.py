"""Predicted times: of one step, of a whole prefill, on one lane of a given profile."""
