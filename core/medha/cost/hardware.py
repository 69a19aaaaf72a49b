"""Accelerators and models as data, and the profiles derived from them.

Figures of accelerators are from their data sheets; `medha.cost.fitted_hardware` holds the fractions that are
reached. Rates are of one device, one direction, dense bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from medha.cost.cost_profile import Attention, Kernel, Link, Operation, Profile
from medha.cost.crossover import crossover_tokens
from medha.cost.fitted_hardware import LINKS, MEASURED, POOLED, TILE_ROWS, WHOLE_WAVES
from medha.errors import ConfigInvalid
from medha.model.latent_shape import LatentShape
from medha.topology import Topology

ATTENTION_BAND = 0.3
"""Relative uncertainty of attention times, up or down: there are no measurements of attention on these devices."""

ATTENTION_BANDWIDTH = 0.85
"""Share of memory bandwidth reached in reading KV.

Paper A reports 0.9 for long decodes (MBU); FlashInfer's decode kernels reach 0.8-0.9.
"""

WEIGHTS_BANDWIDTH = 0.92
"""Largest share of memory bandwidth reached in reading weights.

A micro-benchmark that repeats one layer finds its small shards in the cache and seems to exceed the data
sheet (up to 2.1 times, H100 at TP8); a step, which reads all layers, does not.
"""

ATTENTION_TILES = (16, 64, 128)
"""Rows of FlashInfer's query tiles; query heads that share a KV head are folded into rows."""

MATRIX_TILES = ((128, 256, 1.0), (128, 128, 0.9), (64, 64, 0.6))
"""Output tiles of matrix kernels, for hardware in `WHOLE_WAVES`: (rows, columns, rate relative to the first).

Two large tiles, and a small one for few rows. The rates are the usual ones of such tiles, not fitted.
"""

ATTENTION_LAUNCH_SECONDS = 10e-6
"""Launch time of each layer's attention: the measured floor of its kernel, and of the merge of its splits."""

STEP_LAUNCH_SECONDS = 0.5e-3
"""Assumed launch time of a step in each stage: input preparation and the launch of captured graphs."""


_EXPERT = "expert_"
"""Prefix of the operations of experts."""
_SHARED = "shared_"
"""Prefix, after that of experts, of the operations of the MLP that every token passes beside them."""
_LIKE = {"queries": "qkv", "absorbed_keys": "qkv", "absorbed_values": "output"}
"""Operations of latent attention, and those of other attention whose fitted fractions they get."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """An accelerator and its links, according to their data sheets."""

    name: str
    peak_flops: float  # per second
    memory_bytes_per_second: float
    memory_bytes: float
    node_link_bytes_per_second: float  # between devices of a node
    fabric_link_bytes_per_second: float  # between nodes, for each device
    devices_per_node: int
    units: int  # streaming multiprocessors
    attention_efficiency: float  # share of peak FLOP/s reached in prefill; see ATTENTION_BAND
    fitted_as: str  # the device whose fitted fractions apply: this one, or its nearest kin
    source: str
    host_link_bytes_per_second: float = 31.5e9  # to and from the host's memory, one way; PCIe 4.0 x16


A100 = Hardware(
    name="A100-80G",
    peak_flops=312e12,
    memory_bytes_per_second=2.039e12,
    memory_bytes=80e9,
    node_link_bytes_per_second=300e9,
    fabric_link_bytes_per_second=25e9,
    devices_per_node=8,
    units=108,
    attention_efficiency=0.60,
    fitted_as="A100-80G",
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
    units=132,
    attention_efficiency=0.52,
    fitted_as="H100",
    source="NVIDIA H100 SXM data sheet (2023); DGX H100: NVLink 4, eight 400 Gb/s NDR adapters",
    host_link_bytes_per_second=63e9,  # PCIe 5.0 x16
)
H200 = Hardware(
    name="H200",
    peak_flops=989e12,
    memory_bytes_per_second=4.8e12,
    memory_bytes=141e9,
    node_link_bytes_per_second=450e9,
    fabric_link_bytes_per_second=50e9,
    devices_per_node=8,
    units=132,
    attention_efficiency=0.52,
    fitted_as="H100",
    source="NVIDIA H200 SXM data sheet (2024); DGX H200: NVLink 4, eight 400 Gb/s NDR adapters",
    host_link_bytes_per_second=63e9,
)
HARDWARE = {hardware.name: hardware for hardware in (A100, H100, H200)}


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The experts of a model's sparse layers: gated MLPs, of which each token passes a few."""

    layers: int  # that have experts instead of one MLP
    count: int  # in each of these layers
    per_token: int
    intermediate: int  # of one expert
    shared_intermediate: int = 0  # of the MLP that every token passes beside its experts; 0: there is none


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions that a decoder's cost depends on: gated MLP or experts, grouped-query or latent attention, RMSNorm.

    With latent attention there is one KV head, and `head_dim` is the width of its rows.
    """

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
    layer_weight_bytes: float | None = None
    """Mean bytes of a weight of the layers' linears, scales included, if they are quantised."""
    experts: ExpertShape | None = None
    expert_weight_bytes: float | None = None
    """Mean bytes of a weight of the experts, scales included, if they are quantised."""
    window_tokens: int = 1  # keys that a query sees in a layer with a window
    window_share: float = 0.0  # share of the layers that have a window
    latent: LatentShape | None = None

    @property
    def linear_bytes(self) -> float:
        """Mean bytes of a weight of the layers' linears, experts not counted."""
        return self.dtype_bytes if self.layer_weight_bytes is None else self.layer_weight_bytes

    @property
    def expert_bytes(self) -> float:
        """Mean bytes of a weight of the experts."""
        return self.dtype_bytes if self.expert_weight_bytes is None else self.expert_weight_bytes

    @property
    def layer_parameters(self) -> int:
        """Number of weights of the linear layers of one dense layer."""
        attention = self.hidden * self.head_dim * 2 * (self.query_heads + self.kv_heads)
        if self.latent is not None:
            attention = self.latent.parameters(self.hidden, self.query_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def copied_bytes(self) -> float:
        """Bytes of the layers' weights that every tensor rank holds whole; of matrices, latent attention alone has such."""
        if self.latent is None:
            return 0.0
        return self.layers * self.latent.copied_parameters(self.hidden) * self.linear_bytes

    @property
    def expert_parameters(self) -> int:
        """Number of weights of all experts of all layers."""
        experts = self.experts
        return (
            0 if experts is None else 3 * self.hidden * experts.layers * experts.count * experts.intermediate
        )

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        """The intermediate sizes that occur: of dense layers, and of experts. Tensor parallelism splits each of them."""
        if self.experts is None or self.experts.layers == 0:
            return (self.intermediate,)
        dense = (self.intermediate,) if self.experts.layers < self.layers else ()
        return *dense, self.experts.intermediate

    @property
    def shared_parameters(self) -> int:
        """Number of weights of all layers but the experts: those that every token passes. Routers are among them."""
        if self.experts is None:
            return self.layers * self.layer_parameters
        replaced = 3 * (self.intermediate - self.experts.shared_intermediate) - self.experts.count
        return self.layers * self.layer_parameters - self.experts.layers * self.hidden * replaced

    @property
    def passed_parameters(self) -> float:
        """Number of weights of all layers that a token passes."""
        share = 0.0 if self.experts is None else self.experts.per_token / self.experts.count
        return self.shared_parameters + share * self.expert_parameters

    @property
    def parameters(self) -> int:
        """Number of weights of the whole model, without the few of the norms."""
        return self.shared_parameters + self.expert_parameters + self._embedding_parameters

    @property
    def weights_bytes(self) -> int:
        linears = int(self.shared_parameters * self.linear_bytes)
        experts = int(self.expert_parameters * self.expert_bytes)
        return linears + experts + self._embedding_parameters * self.dtype_bytes

    @property
    def _embedding_parameters(self) -> int:
        return self.vocab * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def window_bytes_per_token(self) -> int:
        """Part of `kv_bytes_per_token` in layers with a window, in bytes."""
        return round(self.window_share * self.kv_bytes_per_token)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token in all layers; a latent row is both."""
        rows = self.layers * self.kv_heads * self.kv_tensors
        return rows * self.head_dim * self.kv_dtype_bytes

    @property
    def kv_tensors(self) -> int:
        """Number of tensors of a layer's KV: K and V, or the latents alone."""
        return 2 if self.latent is None else 1

    @property
    def linear_flops_per_token(self) -> float:
        """Twice the weights that a token passes, the output head included."""
        return 2.0 * (self.passed_parameters + self.vocab * self.hidden)

    @property
    def attention_flops_per_pair(self) -> float:
        """FLOPs of one (query, key) pair in all layers and heads: scores and weighted values."""
        return 4.0 * self.layers * self.query_heads * self.head_dim

    @property
    def chunk_flops_per_pair(self) -> float:
        """FLOPs of a pair in a chunk of many rows: of latents, keys and values of every head are made first."""
        if self.latent is None:
            return self.attention_flops_per_pair
        return 2.0 * self.layers * self.query_heads * (self.latent.query_dim + self.latent.value_dim)

    @property
    def making_flops_per_key(self) -> float:
        """FLOPs in which keys and values of all heads are made of a token's latents; 0 without latents."""
        return (
            0.0 if self.latent is None else float(self.layers * self.query_heads * self.latent.latent_flops)
        )

    @property
    def long_threshold_tokens(self) -> int:
        """The context at which a token's attention takes as many FLOPs as its linear layers."""
        return crossover_tokens(
            self.linear_flops_per_token, self.attention_flops_per_pair, self.window_tokens, self.window_share
        )

    def seen_tokens(self, context: float) -> float:
        """Return the keys that a token at the end of a context sees: the mean over all layers."""
        return context - self.window_share * max(0.0, context - self.window_tokens)

    def prefill_flops(self, tokens: int) -> float:
        """Return the FLOPs of a whole prompt, attention counted causally.

        Some MFU figures count the full square instead.
        """
        head = 2.0 * self.vocab * self.hidden  # for one row: prefill samples once
        linear = 2.0 * self.passed_parameters * tokens
        beyond = max(0, tokens - self.window_tokens)  # rows that do not see the whole context in a window
        pairs = tokens * (tokens + 1) / 2 - self.window_share * beyond * (beyond + 1) / 2
        return linear + head + self.chunk_flops_per_pair * pairs


LLAMA3_8B = ModelShape("Llama-3-8B", 32, 4096, 32, 8, 128, 14336, 128256)
LLAMA3_70B = ModelShape("Llama-3-70B", 80, 8192, 64, 8, 128, 28672, 128256)
LLAMA31_405B = ModelShape("Llama-3.1-405B", 126, 16384, 128, 8, 128, 53248, 128256)
MIXTRAL_8X7B = ModelShape(
    "Mixtral-8x7B", 32, 4096, 32, 8, 128, 14336, 32000, experts=ExpertShape(32, 8, 2, 14336)
)
QWEN3_30B_A3B = ModelShape(
    "Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 6144, 151936, experts=ExpertShape(48, 128, 8, 768)
)
GEMMA3_27B = ModelShape(
    "Gemma-3-27B",
    62,
    5376,
    32,
    16,
    128,
    21504,
    262208,
    tied_embeddings=True,
    window_tokens=1024,
    window_share=52 / 62,
)
DEEPSEEK_V2_LITE = ModelShape(
    "DeepSeek-V2-Lite", 27, 2048, 16, 1, 576, 10944, 102400, experts=ExpertShape(26, 64, 6, 1408, 2 * 1408),
    latent=LatentShape(0, 512, 128, 64, 128),
)  # fmt: skip
DEEPSEEK_V3 = ModelShape(
    "DeepSeek-V3", 61, 7168, 128, 1, 576, 18432, 129280, experts=ExpertShape(58, 256, 8, 2048, 2048),
    latent=LatentShape(1536, 512, 128, 64, 128),
)  # fmt: skip
_MXFP4_BYTES = 17 / 32  # 4 bits, and a scale of 8 bits for 32 of them
GPT_OSS_20B = ModelShape(
    "gpt-oss-20b", 24, 2880, 64, 8, 64, 2880, 201088, window_tokens=128, window_share=0.5,
    experts=ExpertShape(24, 32, 4, 2880), expert_weight_bytes=_MXFP4_BYTES,
)  # fmt: skip
GPT_OSS_120B = ModelShape(
    "gpt-oss-120b", 36, 2880, 64, 8, 64, 2880, 201088, window_tokens=128, window_share=0.5,
    experts=ExpertShape(36, 128, 4, 2880), expert_weight_bytes=_MXFP4_BYTES,
)  # fmt: skip
MODELS = {
    model.name: model
    for model in (
        LLAMA3_8B, LLAMA3_70B, LLAMA31_405B, MIXTRAL_8X7B, QWEN3_30B_A3B, GEMMA3_27B, DEEPSEEK_V2_LITE, DEEPSEEK_V3,
        GPT_OSS_20B, GPT_OSS_120B,
    )
}  # fmt: skip


_MOST_QUERIES = 1 << 20
"""A chunk that no step has."""


def layer_operations(model: ModelShape, hardware: Hardware, tensor: int) -> tuple[Operation, ...]:
    """Return one layer's linear and elementwise operations on one of `tensor` ranks, at the data sheet's full rates.

    Those of dense MLPs and of experts, whose names begin with "expert_", are as if every layer had them.

    Raises:
        ConfigInvalid: tensor parallelism does not divide the model's heads.
    """
    if model.query_heads % tensor or (model.kv_heads % tensor and tensor % model.kv_heads):
        raise ConfigInvalid(
            f"parallelism.tensor is {tensor}, which does not divide the {model.query_heads} query heads and "
            f"{model.kv_heads} KV heads of {model.name}; choose a divisor of both, or a multiple of the KV heads"
        )
    hidden, wide = model.hidden, model.intermediate // tensor
    q_width, kv_width = _widths(model, tensor)
    experts: tuple[Operation, ...] = ()
    if model.experts is not None:
        narrow = model.experts.intermediate // tensor
        experts = (
            _experts("expert_gate_up", model, hardware, hidden, 2 * narrow),
            _experts("expert_down", model, hardware, narrow, hidden),
            _elementwise("expert_activation", model, hardware, 3 * narrow * model.experts.per_token),
        )
        shared = model.experts.shared_intermediate // tensor
        if shared:
            experts += (
                _matrix("expert_shared_gate_up", model, hardware, hidden, 2 * shared, model.linear_bytes),
                _matrix("expert_shared_down", model, hardware, shared, hidden, model.linear_bytes),
            )
    return (
        *_attention_matrices(model, hardware, tensor),
        _matrix("gate_up", model, hardware, hidden, 2 * wide, model.linear_bytes),
        _matrix("down", model, hardware, wide, hidden, model.linear_bytes),
        _elementwise("norm", model, hardware, 2 * hidden, times=2),
        _elementwise("rope", model, hardware, 2 * (q_width + kv_width)),
        _elementwise("activation", model, hardware, 3 * wide),
        _elementwise("residual", model, hardware, 3 * hidden, times=2),
        *experts,
    )


def _attention_matrices(model: ModelShape, hardware: Hardware, tensor: int) -> tuple[Operation, ...]:
    """Return the products before and after a layer's attention, on one of `tensor` ranks."""
    hidden, heads, latent = model.hidden, model.query_heads // tensor, model.latent
    if latent is None:
        q_width, kv_width = _widths(model, tensor)
        shapes = {"qkv": (hidden, q_width + 2 * kv_width), "output": (q_width, hidden)}
    else:
        queries = heads * latent.query_dim
        shapes = {
            "qkv": (hidden, (latent.query_rank or queries) + latent.row_dim),
            # Each head has a matrix of its own, which is as much work as one of all heads' inputs.
            "absorbed_keys": (heads * latent.plain_dim, latent.kv_rank),
            "absorbed_values": (latent.kv_rank, heads * latent.value_dim),
            "output": (heads * latent.value_dim, hidden),
        }
        if latent.query_rank:
            shapes["queries"] = latent.query_rank, queries
    return tuple(_matrix(name, model, hardware, *shape, model.linear_bytes) for name, shape in shapes.items())


def profile_for(model: ModelShape, hardware: Hardware, topology: Topology) -> Profile:
    """Return the costs of one lane of `topology`: the data sheet's roofline times the measured fractions of it.

    Raises:
        ConfigInvalid: tensor parallelism does not divide the model's heads.
    """
    tensor, width = topology.tensor, model.dtype_bytes
    q_width, kv_width = _widths(model, tensor)
    head = _matrix("head", model, hardware, model.hidden, model.vocab // tensor, model.dtype_bytes)
    # The output head is a matrix product like the gate and up projection, and nearest to it in shape.
    head_fraction = POOLED[hardware.fitted_as, "gate_up"]
    attention = Attention(
        launch_seconds=ATTENTION_LAUNCH_SECONDS,
        seconds_per_pair=4.0 * q_width / (hardware.attention_efficiency * hardware.peak_flops),
        kv_seconds_per_token=model.kv_tensors
        * kv_width
        * model.kv_dtype_bytes
        / (ATTENTION_BANDWIDTH * hardware.memory_bytes_per_second),
        rows_per_token=q_width // kv_width,
        tiles=ATTENTION_TILES,
        window_tokens=model.window_tokens,
        window_share=model.window_share,
    )
    heads, query_bytes, result_bytes = model.query_heads // tensor, q_width * width, q_width * width
    if model.latent is not None:  # as they are before they absorb anything, and as heads' values are
        attention = replace(attention, points=_latent_points(attention, model.latent, heads, hardware))
        query_bytes, result_bytes = (
            heads * size * width for size in (model.latent.query_dim, model.latent.value_dim)
        )
    partial_bytes = result_bytes + 4 * heads  # output, and a log-sum-exp for each head
    return Profile(
        name=f"{model.name} on {hardware.name}, {topology}",
        source=f"data sheet, and fractions of it measured on {hardware.fitted_as}",
        layers=model.layers,
        tensor=tensor,
        launch_seconds=STEP_LAUNCH_SECONDS,
        linear=tuple(
            _in_share_of_layers(
                model, _reached(operation, _fraction(model, hardware, tensor, operation.name), hardware)
            )
            for operation in layer_operations(model, hardware, tensor)
        ),
        attention=attention,
        head=_reached(head, head_fraction, hardware),
        all_reduce=_all_reduce(hardware, tensor).of_rows(model.hidden * width, times=2),
        hop=_send(hardware).of_rows(model.hidden * width / tensor),
        exchange=_send(hardware).of_rows((query_bytes + partial_bytes) / 2, times=2),
    )


def _latent_points(
    attention: Attention, latent: LatentShape, heads: int, hardware: Hardware
) -> tuple[tuple[int, float], ...]:
    """Return the seconds per key of many counts of queries: in absorbed form, and from some count on in plain form.

    The slope is that of a long context. In plain form, the latents of a chunk's own tokens are made keys and values,
    too. The linear layers of these tokens count the same work once more.
    """
    least = latent.least_made_rows
    if least is None:
        return ()
    pair, key = attention.seconds_per_pair, attention.kv_seconds_per_token
    making = heads * latent.latent_flops / (hardware.attention_efficiency * hardware.peak_flops)
    knots = {1, max(1, min(int(key / pair), least - 1)), least - 1}
    points = [(count, max(key, count * pair)) for count in sorted(knots)]
    made = pair * latent.made_dim / latent.row_dim
    return *points, *((count, max(points[-1][1], making + count * made)) for count in (least, _MOST_QUERIES))


def _widths(model: ModelShape, tensor: int) -> tuple[int, int]:
    """Return the number of values of a token's queries, and of its keys, on one of `tensor` ranks."""
    return model.query_heads * model.head_dim // tensor, max(1, model.kv_heads // tensor) * model.head_dim


def _matrix(
    name: str, model: ModelShape, hardware: Hardware, inputs: int, outputs: int, weight_bytes: float
) -> Operation:
    second_per_byte = 1 / hardware.memory_bytes_per_second
    return Operation(
        name,
        compute_seconds_per_row=2.0 * inputs * outputs / hardware.peak_flops,
        fixed_seconds=inputs * outputs * weight_bytes * second_per_byte,
        memory_seconds_per_row=(inputs + outputs) * model.dtype_bytes * second_per_byte,
        kernels=tuple(
            Kernel(
                tile_rows=rows,
                tiles_across=-(-outputs // columns),
                units=hardware.units,
                wave_seconds=2.0 * inputs * rows * columns * hardware.units / (rate * hardware.peak_flops),
            )
            for rows, columns, rate in MATRIX_TILES
        ),
    )


def _experts(name: str, model: ModelShape, hardware: Hardware, inputs: int, outputs: int) -> Operation:
    """Return the products of rows with their experts; each expert has weights of the given size. The router is left out."""
    assert model.experts is not None
    count, per_token = model.experts.count, model.experts.per_token
    one = _matrix(name, model, hardware, inputs, outputs, model.expert_bytes)
    return replace(
        one,
        fixed_seconds=count * one.fixed_seconds,
        memory_seconds_per_row=per_token * one.memory_seconds_per_row,
        experts=count,
        experts_per_row=per_token,
    )


_OF_DENSE_LAYERS = ("gate_up", "down", "activation")


def _in_share_of_layers(model: ModelShape, operation: Operation) -> Operation:
    """Return an operation with its mean time over all layers, if only some have it: dense ones, or those with experts."""
    sparse = 0.0 if model.experts is None else model.experts.layers / model.layers
    if operation.name.startswith(_EXPERT):
        return operation.slowed(sparse, sparse, sparse, sparse)
    if operation.name in _OF_DENSE_LAYERS and sparse:
        return operation.slowed(1 - sparse, 1 - sparse, 1 - sparse, 1 - sparse)
    return operation


def _elementwise(name: str, model: ModelShape, hardware: Hardware, values: int, times: int = 1) -> Operation:
    """Return an operation that reads and writes `values` values in all for each row."""
    seconds = values * model.dtype_bytes / hardware.memory_bytes_per_second
    return Operation(name, memory_seconds_per_row=seconds, times=times)


def _fraction(
    model: ModelShape, hardware: Hardware, tensor: int, operation: str
) -> tuple[float, float, float]:
    """Return the operation's own measurements, else those of all models on this hardware.

    There are none of experts and of latent attention: their products are taken to reach what those of dense layers do.
    """
    kind = operation.removeprefix(_EXPERT).removeprefix(_SHARED)
    kind = _LIKE.get(kind, kind)
    measured = MEASURED.get((hardware.name, model.name, tensor, kind))
    return measured or POOLED[hardware.fitted_as, kind]


def _reached(ideal: Operation, fraction: tuple[float, float, float], hardware: Hardware) -> Operation:
    efficiency, bandwidth, launch_seconds = fraction
    reached = ideal.slowed(1.0, 1 / efficiency, 1 / min(bandwidth, WEIGHTS_BANDWIDTH), 1 / bandwidth)
    reached = replace(reached, launch_seconds=launch_seconds)
    if hardware.fitted_as in WHOLE_WAVES:
        return reached
    return replace(reached, kernels=(), tile_rows=TILE_ROWS[hardware.fitted_as] if ideal.kernels else 1)


def _all_reduce(hardware: Hardware, devices: int) -> Link:
    """Return the all-reduce link among the ranks of a pod.

    For counts beyond a node, or not measured, it is that of the nearest measured count.
    """
    if devices == 1:
        return Link()
    measured = {
        key[2]: link
        for key, link in LINKS.items()
        if key[:2] == (hardware.fitted_as, "all_reduce") and (key[2] == key[3] or key[3] == 8)
    }
    floor_seconds, lines = measured[min(measured, key=lambda count: (abs(count - devices), -count))]
    return Link(lines, floor_seconds)


def _send(hardware: Hardware) -> Link:
    """Return the link from a device to its peer on another node: stages and lanes are not assumed to share one."""
    floor_seconds, lines = LINKS[hardware.fitted_as, "send_recv", 2, 1]
    return Link(lines, floor_seconds)
