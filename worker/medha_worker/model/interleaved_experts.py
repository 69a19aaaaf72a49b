"""The tensors of gpt-oss' sparse layers: one for all experts, whose columns are gates and ups in turn, with biases.

Checkpoints have the weights as numbers, [experts, in, out], or in MXFP4, [experts, out, in]. A rank reads its part of
the intermediate dimension, and holds gates beside ups. A part that begins within a block of MXFP4 has the whole block.
"""

from __future__ import annotations

import torch

from medha.errors import CheckpointInvalid
from medha.model.quantisation import MXFP4_BLOCK, StoredTensor
from medha_worker.device import Device
from medha_worker.model.expert_tensors import MlpWeights
from medha_worker.model.linear_reader import LinearReader
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.mxfp4_rows import MXFP4_BLOCK_BYTES, MXFP4_NAN, Mxfp4Rows
from medha_worker.model.quantised_experts import ExpertWeights, QuantisedExperts
from medha_worker.model.quantised_weights import QuantisedWeight
from medha_worker.model.stored_quantised import ReadSlice

_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES = frozenset({"U8"})


class InterleavedExperts:
    """Names and shapes of the tensors of sparse layers, and how a rank reads them; see `ExpertTensors`."""

    def __init__(self, config: ModelConfig) -> None:
        assert config.experts is not None
        self._count, self._wide = config.experts.count, config.experts.intermediate_size
        self._hidden = config.hidden_size
        self._is_quantised = config.expert_weight_bytes(0) is not None
        for name, size in (("hidden_size", self._hidden), ("intermediate_size", self._wide)):
            if self._is_quantised and size % MXFP4_BLOCK:
                raise CheckpointInvalid(
                    f"config.json: {name} is {size}, but experts in MXFP4 have blocks of {MXFP4_BLOCK} values, so that it must "
                    "be a multiple; fetch a checkpoint whose files belong together"
                )

    def tensors(self, layer: str) -> dict[str, StoredTensor]:
        """Return each tensor of the MLP of `layer`, a prefix that ends with a dot."""
        count, wide, hidden = self._count, self._wide, self._hidden
        found = {
            f"{layer}mlp.router.weight": StoredTensor(((count, hidden),)),
            f"{layer}mlp.router.bias": StoredTensor(((count,),)),
        }
        for name, rows, columns in (("gate_up_proj", 2 * wide, hidden), ("down_proj", hidden, wide)):
            weight = f"{layer}mlp.experts.{name}"
            found[f"{weight}_bias"] = StoredTensor(((count, rows),))
            if self._is_quantised:
                blocks = columns // MXFP4_BLOCK
                found[weight + _BLOCKS] = StoredTensor(((count, rows, blocks, MXFP4_BLOCK_BYTES),), _BYTES)
                found[weight + _SCALES] = StoredTensor(((count, rows, blocks),), _BYTES)
            else:
                found[weight] = StoredTensor(((count, columns, rows),))
        return found

    def read(
        self, linears: LinearReader, layer: str, rows: slice, device: Device, *, has_output_bias: bool
    ) -> MlpWeights:
        """Return the weights of this rank; see `ExpertTensors.read`."""
        read = linears.read
        every, prefix = slice(None), f"{layer}mlp.experts."
        pairs, whole = slice(2 * rows.start, 2 * rows.stop), slice(0, self._hidden)
        up, down = f"{prefix}gate_up_proj", f"{prefix}down_proj"

        def placed(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device=device.torch_device, dtype=device.dtype).contiguous()

        weights: tuple[ExpertWeights, ExpertWeights]
        if self._is_quantised:
            weights = (
                self._quantised(read, up, pairs, whole, device, is_pairs=True),
                self._quantised(read, down, whole, rows, device),
            )
        else:
            weights = self._numbers(read, up, down, rows, device)
        return MlpWeights(
            gate_up=weights[0],
            gate_up_bias=placed(_apart(read(f"{up}_bias", every, pairs), 1)),
            down=weights[1],
            down_bias=placed(read(f"{down}_bias", every)) if has_output_bias else None,
            router=placed(read(f"{layer}mlp.router.weight", every).t()),
            router_bias=placed(read(f"{layer}mlp.router.bias", every)),
        )

    def _numbers(
        self, read: ReadSlice, gate_up: str, down: str, rows: slice, device: Device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return gates beside ups, [experts, hidden, 2 * rows], and downs, [experts, rows, hidden]."""
        width, pairs = rows.stop - rows.start, slice(2 * rows.start, 2 * rows.stop)
        wide, narrow = (
            torch.empty(self._count, *shape, dtype=device.dtype, device=device.torch_device)
            for shape in ((self._hidden, 2 * width), (width, self._hidden))
        )
        for expert in range(self._count):
            one = slice(expert, expert + 1)
            wide[expert] = _apart(read(gate_up, one, slice(None), pairs)[0], 1)
            narrow[expert] = read(down, one, rows)[0]
        return wide, narrow

    def _quantised(
        self,
        read: ReadSlice,
        name: str,
        rows: slice,
        columns: slice,
        device: Device,
        *,
        is_pairs: bool = False,
    ) -> QuantisedExperts:
        """Return rows and columns of every expert; `is_pairs`: rows are gates and ups in turn, and are put apart."""
        blocks = slice(columns.start // MXFP4_BLOCK, -(-columns.stop // MXFP4_BLOCK))
        shape = self._count, rows.stop - rows.start, blocks.stop - blocks.start
        scales = torch.empty(*shape, dtype=torch.uint8, device=device.torch_device)
        values = torch.empty(*shape, MXFP4_BLOCK_BYTES, dtype=torch.uint8, device=device.torch_device)
        each = []
        for expert in range(self._count):
            one = slice(expert, expert + 1)
            found = read(name + _SCALES, one, rows, blocks)[0]
            if bool((found == MXFP4_NAN).any()):
                raise CheckpointInvalid(
                    f"tensor {name}{_SCALES} holds {MXFP4_NAN}, which stands for no number; fetch the checkpoint again"
                )
            packed = read(name + _BLOCKS, one, rows, blocks)[0]
            scales[expert] = _apart(found, 0) if is_pairs else found
            values[expert] = _apart(packed, 0) if is_pairs else packed
            part = Mxfp4Rows(
                values[expert],
                scales[expert],
                columns.stop - columns.start,
                columns.start - blocks.start * MXFP4_BLOCK,
            )
            each.append(QuantisedWeight([part]))
        return QuantisedExperts(each)


def _apart(interleaved: torch.Tensor, dim: int) -> torch.Tensor:
    """Return gates before ups of a tensor that has them in turn along a dimension."""
    index = torch.arange(interleaved.shape[dim]).view(-1, 2).t().flatten()
    return interleaved.index_select(dim, index)
