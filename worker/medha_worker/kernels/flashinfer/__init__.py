"""FlashInfer's kernels for NVIDIA GPUs behind the engine's protocol: attention over the paged pool, and operators on rows."""
