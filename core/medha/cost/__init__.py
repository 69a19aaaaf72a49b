"""Predicted times of one step and of a whole prefill, and the accelerators and the work that they are predicted from."""
