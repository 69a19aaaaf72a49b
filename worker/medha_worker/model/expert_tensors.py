"""The tensors of a sparse layer in a checkpoint: their names and shapes, and how a rank reads its columns of every expert.

Experts are split over tensor ranks by their intermediate dimension, as the MLPs of dense layers are: whatever the router
chooses, all ranks then compute the same rows and read the same bytes, and one sum joins their results. A split by expert
would leave the ranks unequal work in each step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from medha.model.quantisation import StoredTensor
from medha_worker.device import Device
from medha_worker.model.families.family import FUSED_BLOCK, FUSED_DOWN, FUSED_GATE_UP
from medha_worker.model.linear_reader import LinearReader, tensors_of_linear
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.quantised_experts import ExpertWeights, QuantisedExperts
from medha_worker.model.quantised_weights import Linear
from medha_worker.model.stored_quantised import ReadSlice


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
        self._config, self._hidden = config, config.hidden_size
        self._experts, self._block = config.experts, config.family.experts
        linears = (name for index in config.experts.layers for name in config.linear_sizes.of_experts(index))
        is_quantised = any(config.format_of(name) is not None for name in linears)
        # A tensor for all experts has no quantised form.
        self._is_fused = not is_quantised and any(
            name.endswith(f".{FUSED_BLOCK}.{FUSED_GATE_UP}") for name in names
        )

    def tensors(self, layer: str) -> dict[str, StoredTensor]:
        """Return each tensor of the MLP of `layer`, a prefix that ends with a dot."""
        count, wide, hidden = self._experts.count, self._experts.intermediate_size, self._hidden
        found = {self._router(layer): StoredTensor(((count, hidden),))}
        if self._experts.routing.is_corrected:
            found[self._block.correction_name(layer)] = StoredTensor(((count,),))
        linears = list(self.shared_names(layer) or ())
        if self._is_fused:
            found[f"{layer}{FUSED_BLOCK}.{FUSED_GATE_UP}"] = StoredTensor(((count, 2 * wide, hidden),))
            found[f"{layer}{FUSED_BLOCK}.{FUSED_DOWN}"] = StoredTensor(((count, hidden, wide),))
        else:
            linears += [
                name for expert in range(count) for name in self._block.names.of_expert(layer, expert)
            ]
        for name in linears:
            found |= tensors_of_linear(self._config, name, self._config.linear_layers[name])
        return found

    def read(
        self,
        linears: LinearReader,
        layer: str,
        rows: slice,
        device: Device,
        *,
        has_output_bias: bool,  # noqa: ARG002 - there are no biases
    ) -> MlpWeights:
        """Return router, gates beside ups, and downs of this rank.

        Args:
            linears: Reads parts of linears and tensors.
            layer: Prefix of the layer's names, with a dot at its end.
            rows: The part of the intermediate dimension that this rank has.
            device: Where the weights go, and their number format.
            has_output_bias: Whether this rank holds the bias of downs.
        """
        dtype, where = device.dtype, device.torch_device
        routed_in = torch.float32 if self._experts.routing.is_float32 else dtype
        router = linears.read(self._router(layer), slice(None)).t().to(device=where, dtype=routed_in)
        names = [self._block.names.of_expert(layer, expert) for expert in range(self._experts.count)]
        weights: tuple[ExpertWeights, ExpertWeights]
        if any(linears.is_quantised(name) for expert in names for name in expert):
            weights = (
                QuantisedExperts([linears.quantised({gate: rows, up: rows}) for gate, up, _ in names]),
                QuantisedExperts([linears.quantised_columns(down, rows) for _, _, down in names]),
            )
        else:
            weights = self._numbers(linears.read, layer, rows, device)
        correction = self._correction(linears.read, layer, device)
        return MlpWeights(
            weights[0], None, weights[1], None, router.contiguous(), router_correction=correction
        )

    def _numbers(
        self, read: ReadSlice, layer: str, rows: slice, device: Device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return gates beside ups, [experts, hidden, 2 * rows], and downs, [experts, rows, hidden]."""
        count, width = self._experts.count, rows.stop - rows.start
        dtype, where = device.dtype, device.torch_device
        gate_up = torch.empty(count, self._hidden, 2 * width, dtype=dtype, device=where)
        down = torch.empty(count, width, self._hidden, dtype=dtype, device=where)
        for expert in range(count):
            gate, up, down_part = self._parts(read, layer, expert, rows)
            gate_up[expert, :, :width] = gate.t()
            gate_up[expert, :, width:] = up.t()
            down[expert] = down_part.t()
        return gate_up, down

    def _correction(self, read: ReadSlice, layer: str, device: Device) -> torch.Tensor | None:
        """Return the correction of the router's choice, float32 [experts]; None if it has none."""
        if not self._experts.routing.is_corrected:
            return None
        found = read(self._block.correction_name(layer), slice(None))
        return found.to(device=device.torch_device, dtype=torch.float32)

    def shared_names(self, layer: str) -> tuple[str, str, str] | None:
        """Return the names of gate, up and down of the MLP beside the experts; None without one."""
        if not self._experts.shared_size:
            return None
        return self._block.names.of_shared(layer)

    def _parts(
        self, read: ReadSlice, layer: str, expert: int, rows: slice
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        every = slice(None)
        if not self._is_fused:
            gate, up, down = self._block.names.of_expert(layer, expert)
            return (
                read(f"{gate}.weight", rows),
                read(f"{up}.weight", rows),
                read(f"{down}.weight", every, rows),
            )
        wide, one = self._experts.intermediate_size, slice(expert, expert + 1)
        gate_up, downs = f"{layer}{FUSED_BLOCK}.{FUSED_GATE_UP}", f"{layer}{FUSED_BLOCK}.{FUSED_DOWN}"
        up_rows = slice(wide + rows.start, wide + rows.stop)
        return read(gate_up, one, rows)[0], read(gate_up, one, up_rows)[0], read(downs, one, every, rows)[0]

    def _router(self, layer: str) -> str:
        return f"{layer}{FUSED_BLOCK}.gate.weight" if self._is_fused else self._block.router_name(layer)
