"""The papers' claims that follow from counting FLOPs and bytes: T10, T15, T16, T17, T21, T22, T23 (papers A and B).

`context_parallel_rows` has those of Meta's paper (T27 to T32). Every row is a pure function. Models and hardware
come from `medha.cost.hardware`. FLOP counts are causal unless a row states otherwise; "1M" is 1e6 tokens, and H100
is the SXM model.

Some constants are our own. They hold for all rows of this module:

* `ATTENTION_EFFICIENCY` and `GEMM_EFFICIENCY`, shares of peak, used only where a row needs a time, not a ratio;
* `BANDWIDTH_EFFICIENCY` and `MEMORY_FRACTION`, shares of a GPU's memory bandwidth and of its memory;
* `STEP_LAUNCH_SECONDS`, `HOP_LATENCY_SECONDS` and `HOP_BYTES_PER_SECOND`, the costs of a launch and of a hop;
* `DECODE_FLOOR_SECONDS`, the time of a decode step of Llama-3 8B on TP8 SPP4 besides attention, fitted to one
  cell (A Fig. 11: KVP2 takes 40 % off at 10M) and then used for all others.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import numpy as np

from medha.cost.hardware import H100, LLAMA3_8B, LLAMA3_70B, Hardware, ModelShape
from medha_papers import context_parallel_rows
from medha_papers.claims import (
    NOMINAL,
    Capacity,
    Row,
    above,
    modelled,
    more_than,
)

ATTENTION_EFFICIENCY = 0.5
GEMM_EFFICIENCY = 0.7
BANDWIDTH_EFFICIENCY = 0.9  # share of peak that long contiguous reads of KV reach
MEMORY_FRACTION = 0.9  # share of a GPU's memory that weights and KV may take
DECODE_FLOOR_SECONDS = 0.0135

STEP_LAUNCH_SECONDS = 10e-6  # per layer of a chunk: about six kernels, launched ahead or by a graph
HOP_LATENCY_SECONDS = 19e-6  # send/recv between two H100 nodes (Vidur's measurements)
HOP_BYTES_PER_SECOND = 36e9  # the same, per GPU


# --- counts -------------------------------------------------------------------------------------------


def causal_flops(model: ModelShape, tokens: float) -> float:
    """Return the FLOPs of a prefill in which each token attends to itself and its predecessors."""
    return (
        2.0 * model.layers * model.layer_parameters * tokens + model.attention_flops_per_pair * tokens**2 / 2
    )


def square_flops(model: ModelShape, tokens: float) -> float:
    """Return the FLOPs of a prefill with the full square of attention, as paper B §2.2 counts it."""
    return 2.0 * model.layers * model.layer_parameters * tokens + model.attention_flops_per_pair * tokens**2


def saturating_chunk_tokens(model: ModelShape, hardware: Hardware, capacity: Capacity) -> float:
    """Return the chunk size from which attention is compute-bound.

    There the intensity c h_q / h_kv reaches the ridge point of the hardware (A eq. 3, B eq. 1).
    """
    ridge = hardware.peak_flops * capacity.compute / (hardware.memory_bytes_per_second * capacity.bandwidth)
    return ridge * model.kv_heads / model.query_heads * model.kv_dtype_bytes / 2


def chunk_attention_ratio(
    model: ModelShape, hardware: Hardware, chunk_tokens: int, capacity: Capacity
) -> float:
    """Return the attention time of a prefill, relative to that with chunks that saturate compute."""
    return max(1.0, saturating_chunk_tokens(model, hardware, capacity) / chunk_tokens)


# --- prefill over stages ------------------------------------------------------------------------------


def spp_prefill_seconds(
    model: ModelShape,
    hardware: Hardware,
    tokens: int,
    stages: int,
    capacity: Capacity = NOMINAL,
    *,
    tensor: int = 8,
    chunk_tokens: int = 4096,
) -> float:
    """Return the time of a lone prefill over `stages` stages.

    It is the time of every chunk in one stage, and of the slowest chunk in the others. A eq. 4 has only T / p
    and hops; the time to fill and drain the pipeline is added here: chunks that follow one another, each
    equally long in all of p stages, leave the last stage after sum + (p - 1) * slowest.
    """
    starts = np.arange(0, tokens, chunk_tokens, dtype=np.float64)
    counts = np.minimum(chunk_tokens, tokens - starts)
    pairs = counts * (starts + (counts + 1) / 2)
    flops = hardware.peak_flops * capacity.compute * tensor
    linear = 2.0 * model.layers * model.layer_parameters * counts / (flops * GEMM_EFFICIENCY)
    attention = model.attention_flops_per_pair * pairs / (flops * ATTENTION_EFFICIENCY)
    chunk = (linear + attention + model.layers * STEP_LAUNCH_SECONDS) / stages
    hop_bytes = chunk_tokens * model.hidden * model.dtype_bytes / tensor
    hop = HOP_LATENCY_SECONDS + hop_bytes / (HOP_BYTES_PER_SECOND * capacity.link)
    return float(chunk.sum() + (stages - 1) * (chunk.max() + hop))


def spp_efficiency(
    model: ModelShape, hardware: Hardware, tokens: int, stages: int, capacity: Capacity
) -> float:
    """Return the scaling efficiency: the speed-up over one stage, divided by `stages`."""
    alone = spp_prefill_seconds(model, hardware, tokens, 1, capacity)
    return alone / (stages * spp_prefill_seconds(model, hardware, tokens, stages, capacity))


def ring_prefill_seconds(
    model: ModelShape,
    hardware: Hardware,
    tokens: int,
    hosts: int,
    capacity: Capacity = NOMINAL,
    *,
    balanced: bool,
    tensor: int = 8,
) -> float:
    """Return the time of a prefill with ring attention over `hosts` hosts of TP8.

    K and V are passed round while partial attentions are computed. `balanced` means striped attention: every
    rank has the same share of the causal triangle. Otherwise each rank has a contiguous part: in every round
    some rank computes a full square, so the triangle takes the time of the square.
    """
    flops = hardware.peak_flops * capacity.compute * tensor
    part = tokens / hosts
    linear = 2.0 * model.layers * model.layer_parameters * part / (flops * GEMM_EFFICIENCY)
    square = model.attention_flops_per_pair / model.layers * part * part / (flops * ATTENTION_EFFICIENCY)
    kv_bytes = model.kv_bytes_per_token / model.layers * part / tensor
    send = HOP_LATENCY_SECONDS + kv_bytes / (HOP_BYTES_PER_SECOND * capacity.link)
    own, others = square / 2, square / 2 if balanced else square  # each rank's own part is a triangle
    return linear + model.layers * (own + (hosts - 1) * max(others, send))


# --- decode -------------------------------------------------------------------------------------------


def kv_read_seconds(
    model: ModelShape, hardware: Hardware, context: float, capacity: Capacity, *, tensor: int = 8
) -> float:
    """Return the time to read the KV of one sequence in all stages, one after the other."""
    bandwidth = hardware.memory_bytes_per_second * capacity.bandwidth * BANDWIDTH_EFFICIENCY
    return context * model.kv_bytes_per_token / tensor / bandwidth


def kvp_decode_seconds(context: float, lanes: int, capacity: Capacity) -> float:
    """Return the TPOT of Llama-3 8B, TP8 SPP4, on H100 at batch 1: attention / kvp + the rest (A eq. 5)."""
    return kv_read_seconds(LLAMA3_8B, H100, context, capacity) / lanes + DECODE_FLOOR_SECONDS


# --- resources ----------------------------------------------------------------------------------------


def gpus_for_ttft(
    model: ModelShape, hardware: Hardware, tokens: float, ttft_seconds: float, capacity: Capacity
) -> float:
    """Return the number of GPUs that compute a prefill in time at peak rate, as A Fig. 2 counts them."""
    return causal_flops(model, tokens) / (ttft_seconds * hardware.peak_flops * capacity.compute)


def longest_by_compute(
    model: ModelShape, hardware: Hardware, gpus: int, ttft_seconds: float, capacity: Capacity
) -> float:
    """Return the tokens whose causal prefill `gpus` GPUs compute within the TTFT at peak rate."""
    budget = gpus * hardware.peak_flops * capacity.compute * ttft_seconds
    half_pair = model.attention_flops_per_pair / 2
    linear = 2.0 * model.layers * model.layer_parameters
    return (sqrt(linear**2 + 4 * half_pair * budget) - linear) / (2 * half_pair)


def longest_by_memory(model: ModelShape, hardware: Hardware, gpus: int, capacity: Capacity) -> float:
    """Return the tokens of KV that `gpus` GPUs hold beside one copy of the weights."""
    usable = gpus * hardware.memory_bytes * capacity.memory * MEMORY_FRACTION
    return (usable - model.weights_bytes) / model.kv_bytes_per_token


# --- rows ---------------------------------------------------------------------------------------------


def t10() -> Row:
    """T10: chunks of 40 tokens saturate attention; chunks of 32 cost 11 % (B §3.1, Fig. 3b; A Fig. 5b)."""
    return Row(
        "T10",
        "B §3.1, Fig. 3b; A §3.1, Fig. 5b",
        "Llama-3 70B on H100: about 40 tokens saturate compute; at 1M, chunks of 32 add 11 % to the attention of 2,048",
        (
            modelled(
                "saturating chunk", "tokens", 40.0, lambda c: saturating_chunk_tokens(LLAMA3_70B, H100, c)
            ),
            modelled(
                "attention time, chunk 32 over 2,048",
                "x",
                1.11,
                lambda c: (
                    chunk_attention_ratio(LLAMA3_70B, H100, 32, c)
                    / chunk_attention_ratio(LLAMA3_70B, H100, 2048, c)
                ),
                order=more_than(1.0),
            ),
        ),
        {"model": "8 query heads per KV head", "hardware": "989 TF/s, 3.35 TB/s; nothing fitted"},
    )


def t15() -> Row:
    """T15: SPP scales with 80 % efficiency and more from 1M to 10M tokens (B App. B.1).

    At the top, 8B has above 70 %; with 8 stages, 70B has 85 %. Ring attention is 1.6x slower.
    """

    def worst(model: ModelShape, stages: tuple[int, ...]) -> Callable[[Capacity], float]:
        lengths = (1_000_000, 2_000_000, 4_000_000, 10_000_000)
        return lambda c: 100 * min(spp_efficiency(model, H100, n, p, c) for n in lengths for p in stages)

    def slower(balanced: bool) -> Callable[[Capacity], float]:
        return lambda c: (
            ring_prefill_seconds(LLAMA3_8B, H100, 1_000_000, 16, c, balanced=balanced)
            / spp_prefill_seconds(LLAMA3_8B, H100, 1_000_000, 16, c)
        )

    return Row(
        "T15",
        "B App. B.1, Fig. 17; A Fig. 8, 9",
        "SPP 1 to 16, 1M to 10M: at least 80 % scaling efficiency (8B > 70 % at the top, 70B 85 % at SPP8), "
        "1.6x faster than ring attention on 128 H100",
        (
            modelled("8B, worst of SPP2 to 16", "%", above(70.0), worst(LLAMA3_8B, (2, 4, 8, 16))),
            modelled(
                "8B and 70B, worst of SPP2 to 8",
                "%",
                above(80.0),
                lambda c: min(worst(LLAMA3_8B, (2, 4, 8))(c), worst(LLAMA3_70B, (2, 4, 8))(c)),
            ),
            modelled(
                "70B at SPP8, 1M",
                "%",
                85.0,
                lambda c: 100 * spp_efficiency(LLAMA3_70B, H100, 1_000_000, 8, c),
                order=more_than(80.0),
                note="direction: above the 80 % that is claimed of all; filling the pipeline and the wire alone cost "
                "less than the paper measured",
            ),
            modelled(
                "ring over contiguous parts, time over SPP",
                "x",
                (1.60, 1.64),
                slower(balanced=False),
                order=more_than(1.0),
            ),
            modelled(
                "striped ring, time over SPP",
                "x",
                (1.60, 1.64),
                slower(balanced=True),
                order=more_than(1.0),
                note="the paper cites striped attention; balanced and overlapped it would be as fast as SPP, so the "
                "claim holds against an unbalanced ring only",
            ),
        ),
        {
            "chunk": "4,096 tokens (B Fig. 5b)",
            "efficiency": f"attention {ATTENTION_EFFICIENCY:.0%}, GEMM {GEMM_EFFICIENCY:.0%} of 989 TF/s",
            "hop": "19 us + 36 GB/s a GPU (measured between two H100 nodes)",
        },
    )


def t16() -> Row:
    """T16: stages cost decodes little: 16 % more at SPP8, 2M tokens (B App. B.1, Fig. 18; A Fig. 10)."""

    def increase(stages: int, capacity: Capacity) -> float:
        hop = HOP_LATENCY_SECONDS / capacity.link
        alone = kv_read_seconds(LLAMA3_8B, H100, 2e6, capacity) + DECODE_FLOOR_SECONDS - 3 * hop
        return 100 * (stages - 1) * hop / alone

    alone = kv_read_seconds(LLAMA3_8B, H100, 2e6, NOMINAL) + DECODE_FLOOR_SECONDS
    implied = 1e3 * 0.16 * alone / 7
    return Row(
        "T16",
        "B App. B.1, Fig. 18; A §3.3, Fig. 10",
        "Decode at 2M tokens, TP8: 16 % slower with 8 stages, marginally with 16",
        (
            modelled(
                "increase at SPP8",
                "%",
                16.0,
                lambda c: increase(8, c),
                order=more_than(0.0),
                note=f"the wire alone; 16 % means {implied:.2f} ms a stage, which is software and not network",
            ),
            modelled("increase at SPP16", "%", (0.0, 20.0), lambda c: increase(16, c), note='"marginal"'),
        ),
        {
            "hop": "19 us (measured between two H100 nodes)",
            "floor": f"{DECODE_FLOOR_SECONDS * 1e3:.1f} ms (T17)",
        },
    )


def t17() -> Row:
    """T17: KVP lowers TPOT (A Fig. 11, B Fig. 7a, 19).

    It takes 40 % off with 2 lanes at 10M. With 4 lanes, decoding is 2.5x faster at 10M and 1.7x at 4M.
    """

    def speed_up(context: float, lanes: int) -> Callable[[Capacity], float]:
        return lambda c: kvp_decode_seconds(context, 1, c) / kvp_decode_seconds(context, lanes, c)

    def less(context: float, lanes: int) -> Callable[[Capacity], float]:
        return lambda c: 100 * (1 - 1 / speed_up(context, lanes)(c))

    return Row(
        "T17",
        "A §3.5, Fig. 11; B Fig. 7a, 19, App. B.2",
        "8B, TP8 SPP4, decode only: KVP2 takes almost 40 % off at 10M (about 30 tokens/s); KVP4 is 2.5x at 10M, 1.7x at 4M",
        (
            modelled("TPOT saved, KVP2, 10M", "%", 40.0, less(10e6, 2), note="the fitted cell"),
            modelled(
                "rate, KVP2, 10M",
                "tokens/s",
                30.0,
                lambda c: 1 / kvp_decode_seconds(10e6, 2, c),
                order=lambda rate, c: rate > 1 / kvp_decode_seconds(10e6, 1, c),
                note="direction: above the rate of one lane; reading KV at 90 % of bandwidth leaves less",
            ),
            modelled("speed-up, KVP4, 10M", "x", 2.5, speed_up(10e6, 4), order=more_than(1.0)),
            modelled("speed-up, KVP4, 4M", "x", 1.7, speed_up(4e6, 4), order=more_than(1.0)),
            modelled(
                "TPOT saved, KVP4, 10M, as B App. B.2 writes",
                "%",
                40.0,
                less(10e6, 4),
                order=more_than(0.0),
                note="B's text says degree 4 where its captions and A say 2",
            ),
        ),
        {
            "KV read": f"{BANDWIDTH_EFFICIENCY:.0%} of 3.35 TB/s",
            "floor": f"{DECODE_FLOOR_SECONDS * 1e3:.1f} ms, fitted to KVP2 at 10M, not scaled by the band",
        },
    )


def t21() -> Row:
    """T21: MBU up to 92 % for 70B with TP and KVP (B Fig. 16, A Fig. 20)."""

    def utilisation(capacity: Capacity) -> float:
        bytes_read = MEMORY_FRACTION * H100.memory_bytes * capacity.memory
        read = bytes_read / (H100.memory_bytes_per_second * capacity.bandwidth)
        floor = LLAMA3_70B.layers * STEP_LAUNCH_SECONDS
        return 100 * read / (read + floor)

    read = MEMORY_FRACTION * H100.memory_bytes / H100.memory_bytes_per_second
    floor_of_t17 = DECODE_FLOOR_SECONDS * LLAMA3_70B.layers / LLAMA3_8B.layers

    return Row(
        "T21",
        "B App. B.4, Fig. 16; A §5.5, Fig. 20",
        "70B with TP and KVP: model bandwidth utilisation up to 92 %",
        (
            modelled(
                "upper bound: a step reads a GPU's full memory once",
                "%",
                92.0,
                utilisation,
                order=more_than(92.0),
                note=f"direction: the bound lies above; 92 % needs a floor below {1e3 * read * (1 / 0.92 - 1):.1f} ms; "
                f"the floor that T17 implies for the same engine, by layers, would allow {100 * read / (read + floor_of_t17):.0f} %",
            ),
        ),
        {
            "memory": f"{MEMORY_FRACTION:.0%} of 80 GB read each step",
            "launch": "10 us a layer, not scaled by the band",
            "missing": "contexts, KVP degrees and kernel efficiency behind the figure",
        },
    )


def t22() -> Row:
    """T22: 10 GPUs for 1M and 40 for 2M tokens at 30 s TTFT and 20 ms TPOT (A Fig. 2).

    On one DGX, compute suffices for 1M tokens and memory for 4M.
    """
    return Row(
        "T22",
        "A §2.1, Fig. 2",
        "8B, 30 s TTFT, 20 ms TPOT: 10 H100 for 1M tokens and 40 for 2M; on one DGX compute ends at about 1M, memory at 4M",
        (
            modelled("GPUs for 1M", "GPUs", 10.0, lambda c: gpus_for_ttft(LLAMA3_8B, H100, 1e6, 30.0, c)),
            modelled("GPUs for 2M", "GPUs", 40.0, lambda c: gpus_for_ttft(LLAMA3_8B, H100, 2e6, 30.0, c)),
            modelled(
                "longest prompt by compute, one DGX",
                "tokens",
                1e6,
                lambda c: longest_by_compute(LLAMA3_8B, H100, 8, 30.0, c),
                order=lambda ours, c: ours < longest_by_memory(LLAMA3_8B, H100, 8, c),
                note='the paper says "about 1M"; direction: compute ends before memory does',
            ),
            modelled(
                "longest context by memory, one DGX",
                "tokens",
                4e6,
                lambda c: longest_by_memory(LLAMA3_8B, H100, 8, c),
                order=lambda ours, c: ours > longest_by_compute(LLAMA3_8B, H100, 8, 30.0, c),
            ),
        ),
        {
            "compute": "causal FLOPs at 100 % of peak, as the paper's theoretical figure",
            "memory": f"{MEMORY_FRACTION:.0%} of 640 GB less 16 GB of weights",
        },
    )


def t23() -> Row:
    """T23: 70B at 1M: 320 GB of KV; 2.4 EFLOP (A §2.1) or 2.8 EFLOP and 48 minutes on one H100 (B §2.2)."""
    exaflops = 1e-18

    return Row(
        "T23",
        "A §2.1; B §2.2",
        "70B, 1M tokens: 320 GB of KV, 2.4 EFLOP (A) or 2.8 EFLOP and at least 48 minutes on one H100 (B)",
        (
            modelled(
                "KV of 2^20 tokens",
                "GiB",
                320.0,
                lambda _: LLAMA3_70B.kv_bytes_per_token * 2**20 / 2**30,
                note="exact: 320 KiB a token",
            ),
            modelled(
                "FLOPs, full square (B)",
                "EFLOP",
                (2.75, 2.85),
                lambda _: exaflops * square_flops(LLAMA3_70B, 1e6),
                note="B counts the masked half of attention too",
            ),
            modelled(
                "FLOPs, causal (A)",
                "EFLOP",
                2.4,
                lambda _: exaflops * causal_flops(LLAMA3_70B, 1e6),
                note="the causal count is 1.45, the square's 2.77: 2.4 is neither",
            ),
            modelled(
                "time on one H100 at peak, full square (B)",
                "min",
                48.0,
                lambda c: square_flops(LLAMA3_70B, 1e6) / (H100.peak_flops * c.compute) / 60,
                note="with the causal count it is half of that",
            ),
        ),
        {"model": "80 layers, 64 query and 8 KV heads", "hardware": "989 TF/s"},
    )


ROWS: tuple[Callable[[], Row], ...] = (t10, t15, t16, t17, t21, t22, t23, *context_parallel_rows.ROWS)
"""All rows in closed form, in the order of the table."""


def rows() -> list[Row]:
    """Compute all rows."""
    return [row() for row in ROWS]
