"""The tensors of a sparse layer in a checkpoint: their names and shapes, and how a rank reads its columns of every expert.

Experts are split over tensor ranks by their intermediate dimension, as the MLPs of dense layers are: whatever the router
chooses, all ranks then compute the same rows and read the same bytes, and one sum joins their results. A split by expert
would leave the ranks unequal work in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from medha.quantisation import StoredTensor
from medha_worker.device import Device
from medha_worker.model.families.family import FUSED_BLOCK, FUSED_DOWN, FUSED_GATE_UP
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.quantised_experts import QuantisedExperts
from medha_worker.model.quantised_weights import Linear

ReadSlice = Callable[..., torch.Tensor]
"""Reads a part of a tensor by its name and a slice for each dimension."""


@dataclass(frozen=True)
class MlpWeights:
    """A rank's part of a layer's MLP, in the form of `LayerWeights`; a dense layer has no router."""

    gate_up: Linear | QuantisedExperts
    gate_up_bias: torch.Tensor | None
    down: Linear | QuantisedExperts
    down_bias: torch.Tensor | None
    router: torch.Tensor | None = None
    router_bias: torch.Tensor | None = None
    router_correction: torch.Tensor | None = None


class ExpertTensors:
    """Names of the tensors of sparse layers, as one checkpoint has them: one for each expert, or one for all."""

    def __init__(self, config: ModelConfig, names: Iterable[str]) -> None:
        assert config.experts is not None
        assert config.family.experts is not None
        self._experts, self._block, self._hidden = config.experts, config.family.experts, config.hidden_size
        self._is_fused = any(name.endswith(f".{FUSED_BLOCK}.{FUSED_GATE_UP}") for name in names)

    def tensors(self, layer: str) -> dict[str, StoredTensor]:
        """Return each tensor of the MLP of `layer`, a prefix that ends with a dot."""
        return {name: StoredTensor((shape,)) for name, shape in self._shapes(layer).items()}

    def _shapes(self, layer: str) -> dict[str, tuple[int, ...]]:
        count, wide, hidden = self._experts.count, self._experts.intermediate_size, self._hidden
        shapes: dict[str, tuple[int, ...]] = {self._router(layer): (count, hidden)}
        if self._experts.routing.is_corrected:
            shapes[self._block.correction_name(layer)] = (count,)
        shared = self._experts.shared_size
        if shared:
            shapes[self._block.shared_name(layer, self._block.gate)] = (shared, hidden)
            shapes[self._block.shared_name(layer, self._block.up)] = (shared, hidden)
            shapes[self._block.shared_name(layer, self._block.down)] = (hidden, shared)
        if self._is_fused:
            shapes[f"{layer}{FUSED_BLOCK}.{FUSED_GATE_UP}"] = (count, 2 * wide, hidden)
            shapes[f"{layer}{FUSED_BLOCK}.{FUSED_DOWN}"] = (count, hidden, wide)
            return shapes
        for expert in range(count):
            shapes[self._block.linear_name(layer, expert, self._block.gate)] = (wide, hidden)
            shapes[self._block.linear_name(layer, expert, self._block.up)] = (wide, hidden)
            shapes[self._block.linear_name(layer, expert, self._block.down)] = (hidden, wide)
        return shapes

    def read(
        self,
        read: ReadSlice,
        layer: str,
        rows: slice,
        device: Device,
        *,
        has_output_bias: bool,  # noqa: ARG002 - there are no biases
    ) -> MlpWeights:
        """Return router, gates beside ups, and downs of this rank.

        Args:
            read: Reads a part of a tensor.
            layer: Prefix of the layer's names, with a dot at its end.
            rows: The part of the intermediate dimension that this rank has.
            device: Where the weights go, and their number format.
            has_output_bias: Whether this rank holds the bias of downs.
        """
        count, width = self._experts.count, rows.stop - rows.start
        dtype, where = device.dtype, device.torch_device
        routed_in = torch.float32 if self._experts.routing.is_float32 else dtype
        router = read(self._router(layer), slice(None)).t().to(device=where, dtype=routed_in).contiguous()
        gate_up = torch.empty(count, self._hidden, 2 * width, dtype=dtype, device=where)
        down = torch.empty(count, width, self._hidden, dtype=dtype, device=where)
        for expert in range(count):
            gate, up, down_part = self._parts(read, layer, expert, rows)
            gate_up[expert, :, :width] = gate.t()
            gate_up[expert, :, width:] = up.t()
            down[expert] = down_part.t()
        correction = self._correction(read, layer, device)
        return MlpWeights(gate_up, None, down, None, router, router_correction=correction)

    def _correction(self, read: ReadSlice, layer: str, device: Device) -> torch.Tensor | None:
        """Return the correction of the router's choice, float32 [experts]; None if it has none."""
        if not self._experts.routing.is_corrected:
            return None
        found = read(self._block.correction_name(layer), slice(None))
        return found.to(device=device.torch_device, dtype=torch.float32)

    def shared_names(self, layer: str) -> tuple[str, str, str] | None:
        """Return the names of gate, up and down, without `.weight`, of the MLP beside the experts; None without one."""
        if not self._experts.shared_size:
            return None
        block = self._block
        gate, up, down = (
            block.shared_name(layer, linear).removesuffix(".weight")
            for linear in (block.gate, block.up, block.down)
        )
        return gate, up, down

    def _parts(
        self, read: ReadSlice, layer: str, expert: int, rows: slice
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        every, block = slice(None), self._block
        if not self._is_fused:
            return (
                read(block.linear_name(layer, expert, block.gate), rows),
                read(block.linear_name(layer, expert, block.up), rows),
                read(block.linear_name(layer, expert, block.down), every, rows),
            )
        wide, one = self._experts.intermediate_size, slice(expert, expert + 1)
        gate_up, down = f"{layer}{FUSED_BLOCK}.{FUSED_GATE_UP}", f"{layer}{FUSED_BLOCK}.{FUSED_DOWN}"
        up_rows = slice(wide + rows.start, wide + rows.stop)
        return read(gate_up, one, rows)[0], read(gate_up, one, up_rows)[0], read(down, one, every, rows)[0]

    def _router(self, layer: str) -> str:
        return f"{layer}{FUSED_BLOCK}.gate.weight" if self._is_fused else self._block.router_name(layer)
