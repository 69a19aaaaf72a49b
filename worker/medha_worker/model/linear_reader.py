"""Reads a rank's slices of linears, quantised or not, of one checkpoint: products' weights, side by side where they share an input."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from medha.model.quantisation import StoredTensor
from medha_worker.device import Device
from medha_worker.kernels.quantised_rows import PlainRows, QuantisedRows, WeightRows
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.quantised_weights import Linear, QuantisedWeight
from medha_worker.model.stored_quantised import ReadSlice, WeightSlice, read_rows


def tensors_of_linear(config: ModelConfig, layer: str, shape: tuple[int, int]) -> dict[str, StoredTensor]:
    """Return the tensors that store a linear's weight, [rows, columns], but not its bias, by name."""
    form = config.format_of(layer)
    if form is None:
        return {f"{layer}.weight": StoredTensor((shape,))}
    return {f"{layer}.{part}": tensor for part, tensor in form.tensors(*shape).items()}


class LinearReader:
    """Reads linears of a checkpoint; `read` reads a part of a tensor by its name and a slice for each dimension."""

    def __init__(self, config: ModelConfig, device: Device, read: ReadSlice) -> None:
        self.read = read
        self._config, self._device = config, device

    def is_quantised(self, layer: str) -> bool:
        """Return True if the linear of this name is quantised."""
        return self._config.format_of(layer) is not None

    def column_parallel(self, parts: Mapping[str, slice]) -> Linear:
        """Return slices of the rows of several weights side by side, [in, out of all]."""
        if any(map(self.is_quantised, parts)):
            return self.quantised(parts)
        widths = [rows.stop - rows.start for rows in parts.values()]
        fused = torch.empty(
            self._config.hidden_size, sum(widths), dtype=self._device.dtype, device=self._device.torch_device
        )
        first = 0
        for (name, rows), width in zip(parts.items(), widths, strict=True):
            fused[:, first : first + width] = self.read(f"{name}.weight", rows).t()
            first += width
        return fused

    def row_parallel(self, name: str, columns: slice) -> Linear:
        """Return a slice of the columns of a weight, [own in, out]."""
        if self.is_quantised(name):
            return self.quantised_columns(name, columns)
        return self._convert(self.read(f"{name}.weight", slice(None), columns).t())

    def quantised(self, parts: Mapping[str, slice]) -> QuantisedWeight:
        """Return slices of the rows of several weights, each in the form in which it is stored."""
        return QuantisedWeight([self.rows(layer, rows) for layer, rows in parts.items()])

    def quantised_columns(self, name: str, columns: slice) -> QuantisedWeight:
        """Return a slice of the columns of a weight, in the form in which it is stored."""
        every = slice(0, self._config.linear_layers[name][0])
        return QuantisedWeight([self.rows(name, every, range(columns.start, columns.stop))])

    def rows(self, layer: str, rows: slice, columns: range | None = None) -> PlainRows | QuantisedRows:
        """Return rows of a weight in the form in which it is stored; `columns` are all unless given."""
        form, (rows_of_all, columns_of_all) = (
            self._config.format_of(layer),
            self._config.linear_layers[layer],
        )
        some = columns if columns is not None else range(columns_of_all)
        if form is None:
            return PlainRows(self._convert(self.read(f"{layer}.weight", rows, slice(some.start, some.stop))))
        part = WeightSlice(layer, range(rows.start, rows.stop), some, rows_of_all, columns_of_all)
        return read_rows(part, form, partial(self._part, layer), self._place)

    def numbers(self, layer: str, rows: slice) -> torch.Tensor:
        """Return rows of a weight as numbers, [rows, columns]: float32 if they are quantised, else as they are stored."""
        if not self.is_quantised(layer):
            return self.read(f"{layer}.weight", rows)
        found: WeightRows = self.rows(layer, rows)
        return found.numbers(slice(0, found.rows), torch.float32)

    def _part(self, layer: str, name: str, *index: slice) -> torch.Tensor:
        return self.read(f"{layer}.{name}", *index)

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Put a tensor into the device's memory, as it is."""
        return tensor.to(self._device.torch_device)

    def _convert(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=self._device.torch_device, dtype=self._device.dtype).contiguous()
