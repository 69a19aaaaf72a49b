"""Attention, matrix products and row operators in float32, compiled for this machine's CPU when a rank starts."""
