"""Kernels in Triton, for what neither torch nor FlashInfer has; importing them needs the package `triton`."""
