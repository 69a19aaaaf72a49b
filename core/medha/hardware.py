"""Accelerators and models as data, and the profile that follows from them.

Figures of accelerators are their data sheets'; `medha.fitted` adds how much of them is reached. Rates are of one device,
one direction, dense bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass

from medha.errors import ConfigInvalid
from medha.profile import Attention, Link, Operation, Profile
from medha.topology import Topology


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator and its links, as their data sheets say."""

    name: str
    peak_flops: float  # per second
    memory_bytes_per_second: float
    memory_bytes: float
    node_link_bytes_per_second: float  # between devices of a node
    fabric_link_bytes_per_second: float  # between nodes, for each device
    devices_per_node: int
    source: str


A100 = Hardware(
    name="A100-80G",
    peak_flops=312e12,
    memory_bytes_per_second=2.039e12,
    memory_bytes=80e9,
    node_link_bytes_per_second=300e9,
    fabric_link_bytes_per_second=25e9,
    devices_per_node=8,
    source="NVIDIA A100 80GB SXM data sheet (2021); DGX A100: NVLink 3, eight 200 Gb/s HDR adapters",
)
H100 = Hardware(
    name="H100",
    peak_flops=989e12,
    memory_bytes_per_second=3.35e12,
    memory_bytes=80e9,
    node_link_bytes_per_second=450e9,
    fabric_link_bytes_per_second=50e9,
    devices_per_node=8,
    source="NVIDIA H100 SXM data sheet (2023); DGX H100: NVLink 4, eight 400 Gb/s NDR adapters",
)
H200 = Hardware(
    name="H200",
    peak_flops=989e12,
    memory_bytes_per_second=4.8e12,
    memory_bytes=141e9,
    node_link_bytes_per_second=450e9,
    fabric_link_bytes_per_second=50e9,
    devices_per_node=8,
    source="NVIDIA H200 SXM data sheet (2024); DGX H200: NVLink 4, eight 400 Gb/s NDR adapters",
)
HARDWARE = {hardware.name: hardware for hardware in (A100, H100, H200)}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a decoder's cost depends on: gated MLP, grouped-query attention, RMSNorm."""

    name: str
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    dtype_bytes: int = 2
    kv_dtype_bytes: int = 2
    tied_embeddings: bool = False

    @property
    def layer_parameters(self) -> int:
        """Weights of the linear layers of one layer."""
        attention = self.hidden * self.head_dim * 2 * (self.query_heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """Weights of the whole model, without the norms' few."""
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        return self.layers * self.layer_parameters + embeddings

    @property
    def weights_bytes(self) -> int:
        return self.parameters * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_dtype_bytes

    @property
    def linear_flops_per_token(self) -> float:
        """2 x the weights that a token passes, the output head included."""
        return 2.0 * (self.layers * self.layer_parameters + self.vocab * self.hidden)

    @property
    def attention_flops_per_pair(self) -> float:
        """Of one (query, key) pair in all layers and heads: scores and weighted values."""
        return 4.0 * self.layers * self.query_heads * self.head_dim

    @property
    def long_threshold_tokens(self) -> int:
        """The context at which a token's attention takes as many FLOPs as its linear layers (DESIGN §5)."""
        return int(self.linear_flops_per_token / self.attention_flops_per_pair)

    def prefill_flops(self, tokens: int) -> float:
        """Of a whole prompt, attention counted causally (not the full square, which some MFU figures use)."""
        head = 2.0 * self.vocab * self.hidden  # of one row: prefill samples once
        linear = 2.0 * self.layers * self.layer_parameters * tokens
        return linear + head + self.attention_flops_per_pair * tokens * (tokens + 1) / 2


LLAMA3_8B = ModelShape("Llama-3-8B", 32, 4096, 32, 8, 128, 14336, 128256)
LLAMA3_70B = ModelShape("Llama-3-70B", 80, 8192, 64, 8, 128, 28672, 128256)
LLAMA31_405B = ModelShape("Llama-3.1-405B", 126, 16384, 128, 8, 128, 53248, 128256)
MODELS = {model.name: model for model in (LLAMA3_8B, LLAMA3_70B, LLAMA31_405B)}


def profile_for(model: ModelShape, hardware: Hardware, topology: Topology) -> Profile:
    """Costs of one lane of `topology`, from the data sheet and fitted efficiencies.

    Raises:
        ConfigInvalid: tensor parallelism does not divide the model's heads.
    """
    tensor = topology.tensor
    if model.query_heads % tensor or (model.kv_heads % tensor and tensor % model.kv_heads):
        raise ConfigInvalid(
            f"parallelism.tensor is {tensor}, which does not divide the {model.query_heads} query heads and "
            f"{model.kv_heads} KV heads of {model.name}; choose a divisor of both, or a multiple of the KV heads"
        )
    q_width = model.query_heads * model.head_dim // tensor
    kv_heads = max(1, model.kv_heads // tensor)
    kv_width = kv_heads * model.head_dim
    wide = model.intermediate // tensor
    flops, bandwidth, width = (
        0.7 * hardware.peak_flops,
        0.85 * hardware.memory_bytes_per_second,
        model.dtype_bytes,
    )

    def gemm(name: str, k: int, n: int) -> Operation:
        return Operation(
            name,
            launch_seconds=5e-6,
            compute_seconds_per_row=2.0 * k * n / flops,
            fixed_seconds=k * n * width / bandwidth,
            memory_seconds_per_row=(k + n) * width / bandwidth,
            tile_rows=64,
        )

    def elementwise(name: str, values_per_row: int) -> Operation:
        return Operation(name, launch_seconds=3e-6, memory_seconds_per_row=values_per_row * width / bandwidth)

    hidden = model.hidden
    linear = (
        gemm("qkv", hidden, q_width + 2 * kv_width),
        gemm("output", q_width, hidden),
        gemm("gate_up", hidden, 2 * wide),
        gemm("down", wide, hidden),
        elementwise("norms", 4 * hidden),
        elementwise("rope", 2 * (q_width + kv_width)),
        elementwise("activation", 3 * wide),
        elementwise("residuals", 6 * hidden),
    )
    attention_flops = 0.6 * hardware.peak_flops
    attention = Attention(
        launch_seconds=10e-6,
        seconds_per_pair=4.0 * q_width / attention_flops,
        kv_seconds_per_token=2.0 * kv_width * model.kv_dtype_bytes / bandwidth,
        rows_per_token=q_width // kv_width,
        tiles=(16, 64, 128),
    )
    link = hardware.node_link_bytes_per_second
    ring = 2.0 * (tensor - 1) / tensor
    return Profile(
        name=f"{model.name} on {hardware.name}, {topology}",
        source="roofline",
        layers=model.layers,
        linear=linear,
        attention=attention,
        head=gemm("head", hidden, model.vocab // tensor),
        all_reduce=Link(2 * 30e-6, 2 * ring * hidden * width / (0.6 * link)) if tensor > 1 else Link(),
        hop=Link(20e-6, hidden * width / tensor / (0.7 * hardware.fabric_link_bytes_per_second)),
        exchange=Link(
            2 * 20e-6,
            (2 * q_width * width + 4 * q_width // model.head_dim)
            / (0.7 * hardware.fabric_link_bytes_per_second),
        ),
    )
