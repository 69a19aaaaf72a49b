"""The scales of K and V that a checkpoint stores: their names and shapes, and how a rank reads those of its heads."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from medha.errors import CheckpointInvalid
from medha.model.quantisation import StoredTensor
from medha_worker.model.kv_scales import LayerScales

_PUBLISHED_NAMES = (
    ("k_scale", "v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
)
"""Names of the scales of a layer's K and V, by the tools that write them; the first are those of compressed-tensors."""


class StoredKvScales:
    """The scales of all layers, under the names that the files use; if they have none, under the first of the names."""

    def __init__(self, names: Collection[str], kv_heads: int, *, per_head: bool) -> None:
        """`names` are those of all tensors of the checkpoint; `per_head`: each of the `kv_heads` has a scale."""
        first = "model.layers.0.self_attn."
        found = [pair for pair in _PUBLISHED_NAMES if f"{first}{pair[0]}" in names]
        self._names = (found or [_PUBLISHED_NAMES[0]])[0]
        self._shapes: tuple[tuple[int, ...], ...] = ((1,), ())
        if per_head:
            self._shapes = ((kv_heads, 1, 1), (kv_heads, 1), (kv_heads,))

    def tensors(self, attention: str) -> dict[str, StoredTensor]:
        """Return the tensors of a layer, whose names begin with `attention`."""
        return {f"{attention}{name}": StoredTensor(self._shapes) for name in self._names}

    def read(self, read: Callable[[str], torch.Tensor], attention: str, heads: slice) -> LayerScales:
        """Return the scales of a rank's KV heads; `read` returns a whole tensor.

        Raises:
            CheckpointInvalid: a scale is no positive number.
        """
        keys, values = (self._scales(f"{attention}{name}", read, heads) for name in self._names)
        return LayerScales(keys, values)

    def _scales(self, name: str, read: Callable[[str], torch.Tensor], heads: slice) -> torch.Tensor:
        stored = read(name).float().reshape(-1, 1)
        if not bool(((stored > 0) & stored.isfinite()).all()):
            raise CheckpointInvalid(
                f"tensor {name} is {stored.flatten().tolist()}, but scales must be positive numbers; "
                "fetch the checkpoint again, or set spec.kvCache.dtype to auto"
            )
        return stored[heads] if len(stored) > 1 else stored.expand(heads.stop - heads.start, 1).contiguous()
