"""Estimated FLOPs and memory reads of one rank's part of a step, and the peaks that they are compared with.

They are counted from sizes alone, as the model needs them: padding, repeated work and traffic of activations count as
nothing. Divided by time and by the peak of the device, they are MFU and MBU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from medha.cost.hardware import A100, H100, H200, ModelShape
from medha.cost.touched_experts import touched_share


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one rank in one step, in numbers of rows and keys."""

    rows: int = 0
    """Tokens whose linear layers this rank computes."""
    sampled_rows: int = 0
    """Rows that pass the output head."""
    pairs: int = 0
    """(Query, key) pairs that this rank attends to, for its own rows and for those of other lanes."""
    keys: int = 0
    """Tokens whose keys and values are read, once for each sequence."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """FLOPs and bytes of one rank's part of the model, made once: estimates of a step then take a few additions."""

    row_flops: float
    sampled_row_flops: float
    pair_flops: float
    chunk_pair_flops: float  # if keys and values are made of latents; else the same
    made_key_flops: float  # of making those of a token; 0 without latents
    layers_bytes: float  # of what every row passes
    head_bytes: float
    key_bytes: float  # of the keys and values of one token
    experts_bytes: float  # of all experts
    experts: int  # of a layer; a row passes `experts_per_row` of them
    experts_per_row: int

    @classmethod
    def of(cls, shard: ModelShape) -> Self:
        """Return the costs of a shard, which has the sizes of what one rank holds: layers, heads, columns, head rows."""
        head, experts = shard.vocab * shard.hidden, shard.experts
        return cls(
            row_flops=2.0 * shard.passed_parameters,
            sampled_row_flops=2.0 * head,
            pair_flops=shard.attention_flops_per_pair,
            chunk_pair_flops=shard.chunk_flops_per_pair,
            made_key_flops=shard.making_flops_per_key,
            layers_bytes=float(shard.shared_parameters * shard.linear_bytes),
            head_bytes=float(head * shard.dtype_bytes),
            key_bytes=float(shard.kv_bytes_per_token),
            experts_bytes=float(shard.expert_parameters * shard.expert_bytes),
            experts=1 if experts is None else experts.count,
            experts_per_row=1 if experts is None else experts.per_token,
        )

    def flops(self, work: StepWork) -> float:
        """Return the FLOPs of a step: two for each weight that a row passes, and four for each pair and head dimension.

        Latents count in the form that takes fewer FLOPs, as if all sequences of the step had the same. A row's own latent
        takes the same in either form, which the weights that it passes include.
        """
        made_keys = max(work.keys - work.rows, 0)
        attention = min(
            self.pair_flops * work.pairs,
            self.chunk_pair_flops * work.pairs + self.made_key_flops * made_keys,
        )
        return self.row_flops * work.rows + self.sampled_row_flops * work.sampled_rows + attention

    def read_bytes(self, work: StepWork) -> float:
        """Return the bytes that a step must read: all weights that it uses once, and each sequence's keys and values once.

        Of experts, it reads those that its rows are expected to pass (`touched_share`). A large chunk really reads keys
        and values several times, so that its reads are underestimated.
        """
        weights = (self.layers_bytes if work.rows else 0.0) + (self.head_bytes if work.sampled_rows else 0.0)
        if self.experts_bytes:
            rows = np.array(work.rows, np.float64)
            weights += self.experts_bytes * float(touched_share(self.experts, self.experts_per_row, rows))
        return weights + self.key_bytes * work.keys


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """Rates of one device according to its data sheet."""

    flops_per_second: float  # dense, in 16-bit types
    memory_bytes_per_second: float


DEVICE_PEAKS = {
    "NVIDIA A10": DevicePeak(125e12, 600e9),
    "NVIDIA A100-PCIE-40GB": DevicePeak(A100.peak_flops, 1.555e12),
    "NVIDIA A100-SXM4-40GB": DevicePeak(A100.peak_flops, 1.555e12),
    "NVIDIA A100 80GB PCIe": DevicePeak(A100.peak_flops, 1.935e12),
    "NVIDIA A100-SXM4-80GB": DevicePeak(A100.peak_flops, A100.memory_bytes_per_second),
    "NVIDIA L4": DevicePeak(121e12, 300e9),
    "NVIDIA L40S": DevicePeak(362e12, 864e9),
    "NVIDIA H100 PCIe": DevicePeak(756e12, 2.0e12),
    "NVIDIA H100 NVL": DevicePeak(835e12, 3.9e12),
    "NVIDIA H100 80GB HBM3": DevicePeak(H100.peak_flops, H100.memory_bytes_per_second),
    "NVIDIA H200": DevicePeak(H200.peak_flops, H200.memory_bytes_per_second),
    "NVIDIA B200": DevicePeak(2250e12, 8.0e12),
}
"""Peaks by the name that the driver gives a device; NVIDIA's data sheets, without sparsity."""


def peak_of(device_name: str, element_bytes: int) -> DevicePeak | None:
    """Return the peak of a device for elements of a size; None unless it is in the table, and they are of 16 bits."""
    return DEVICE_PEAKS.get(device_name) if element_bytes == 2 else None
