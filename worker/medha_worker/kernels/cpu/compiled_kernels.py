"""The kernels compiled for this machine's CPU, and the conditions under which they can be used."""

from __future__ import annotations

from dataclasses import replace

import torch

from medha_worker.device import Device
from medha_worker.kernels.cpu.compiled_attention import CpuAttention
from medha_worker.kernels.cpu.compiled_products import CompiledProducts
from medha_worker.kernels.cpu.compiled_rows import CompiledRows
from medha_worker.kernels.cpu.helper_team import HelperTeam
from medha_worker.kernels.cpu.host_compiler import Target
from medha_worker.kernels.expert_products import ProductPerExpert
from medha_worker.kernels.protocol import Kernels, KernelSizes, KernelsUnavailable


def compiled_kernels(
    sizes: KernelSizes, device: Device, others: Kernels, *, invariant: bool = False
) -> Kernels:
    """Return compiled attention, products and row operators; `others` are for rows that do not fill vector registers.

    `invariant`: see `CpuAttention`.

    Raises:
        KernelsUnavailable: they cannot run this model on this device.
    """
    if not device.is_host:
        raise KernelsUnavailable(f"they run on CPUs, and the device is {device.torch_device}")
    if device.dtype != torch.float32:
        raise KernelsUnavailable(f"they compute in float32, and the model runs in {device.dtype}")
    lanes = Target.of_host().lanes
    if sizes.head_dim % lanes:
        raise KernelsUnavailable(f"heads of {sizes.head_dim} values do not fill vector registers of {lanes}")
    team = HelperTeam()
    group = sizes.query_heads // sizes.kv_heads
    attention = CpuAttention(sizes.head_dim, group, team, invariant=invariant, has_fp8_kv=sizes.has_fp8_kv)
    made_heads = others.made_heads
    if invariant:
        made_heads = None
    elif sizes.made_head_dim and sizes.made_head_dim % lanes == 0:
        made_heads = CpuAttention(sizes.made_head_dim, 1, team)
    products = CompiledProducts(team)
    kernels = replace(
        others,
        name="cpu",
        attention=attention,
        products=products,
        experts=ProductPerExpert(products),
        made_heads=made_heads,
        pack=products.pack,
    )
    widths = sizes.hidden_size, sizes.intermediate_size, sizes.expert_intermediate_size, sizes.head_dim // 2
    if any(width % lanes for width in (*widths, *sizes.further_widths)):
        return kernels
    return replace(kernels, rows=CompiledRows(team))
