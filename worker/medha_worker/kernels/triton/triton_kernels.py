"""Our kernels in Triton as a set: products, norms and attention whose tiles do not depend on the step."""

from __future__ import annotations

from dataclasses import replace

from medha_worker.device import Device
from medha_worker.kernels.protocol import Kernels, KernelSizes, KernelsUnavailable
from medha_worker.kernels.torch_rows import TorchRows
from medha_worker.kernels.triton.triton_attention import TILE_ROWS, TritonAttention
from medha_worker.kernels.triton.triton_products import TritonExpertProducts, TritonProducts
from medha_worker.kernels.triton.triton_rows import TritonRows


def triton_kernels(sizes: KernelSizes, device: Device, others: Kernels) -> Kernels:
    """Return kernels in Triton; `others` write K and V, and sample.

    Raises:
        KernelsUnavailable: they cannot run this model.
    """
    if sizes.made_head_dim:
        raise KernelsUnavailable("they have no attention over latents, which all heads of the model share")
    if sizes.has_fp8_kv:
        raise KernelsUnavailable("they read no KV in FP8, for which spec.kvCache.dtype asks")
    group = sizes.query_heads // sizes.kv_heads
    if group > TILE_ROWS:
        raise KernelsUnavailable(
            f"a KV head has at most {TILE_ROWS} query heads, and the model's have {group}"
        )
    return replace(
        others,
        name="triton",
        attention=TritonAttention(device, sizes),
        products=TritonProducts(),
        experts=TritonExpertProducts(),
        rows=TritonRows(TorchRows()),
    )
