"""Meta's context parallelism (paper C, Llama-3.1 405B on up to 128 H100) in closed form: rows T27 to T32.

The model is ring attention over N hosts of TP8. Per layer a rank computes N partial attentions and exchanges
N - 1 messages. Each exchange overlaps with a partial attention, so only its excess over that counts (C §3.5,
Table 5); pass-Q returns the partial outputs by one All2All after the loop (C appendix C). Linear layers and a
fixed time are added::

    TTFT = fixed + GEMM(T) + layers * (N * attn + (N - 1) * max(0, send - attn)[+all2all])

Four constants hold for all rows (`Fit`): attention rate and link bandwidth are taken from C Table 5; GEMM
rate and the fixed time were fitted to C Table 4. None is tuned per row. Times of decodes, and of TP over
several hosts (Tables 6 to 8), need a few more constants, which are fitted to cells of Tables 6 to 8; the rows
name them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import log

from medha.cost.hardware import LLAMA31_405B
from medha_papers.claims import CORNERS, NOMINAL, Capacity, Figure, Row, modelled, untestable

LAYERS = LLAMA31_405B.layers
HIDDEN = LLAMA31_405B.hidden
QUERY_HEADS = LLAMA31_405B.query_heads
KV_HEADS = LLAMA31_405B.kv_heads
HEAD_DIM = LLAMA31_405B.head_dim
PARAMETERS = 405e9  # C Table 9, used as printed
GPUS_PER_HOST = 8  # TP8, one KV head on each GPU (C §4.1)
ELEMENT_BYTES = 2  # Q, K, V in bf16
TOTAL_TOKENS = 128_000  # P + T in C Table 4


@dataclass(frozen=True, slots=True)
class Fit:
    """Constants of the model; rates are per GPU."""

    attention_flops: float = 515e12  # C Table 5: ATTN 414 us and 1608 us
    link_bytes_per_second: float = 26e9  # C Table 5: SendRecv 627 us and 631 us
    gemm_flops: float = 560e12  # fitted to C Table 4
    fixed_seconds: float = 0.70  # fitted to C Table 4


FIT = Fit()

TABLE_4: tuple[tuple[int, float, float], ...] = (
    (1280, 1023.39, 898.71),
    (3200, 1110.18, 1046.43),
    (4160, 1298.92, 1280.1),
    (6400, 1305.56, 1302.01),
    (12800, 2080.67, 2205.27),
    (25600, 3353.02, 3617.02),
    (38400, 4629.23, 4922.52),
    (51200, 5745.08, 6217.83),
    (64000, 6845.21, 7367.99),
    (76800, 7890.35, 8468.66),
    (89600, 8697.27, 9666.62),
    (102400, 10105.78, 10652.39),
    (115200, 11136.4, 11571.62),
    (128000, 11462.15, 12360.57),
)
"""Rows of new tokens T, TTFT of pass-KV and TTFT of pass-Q (ms); CP4, P + T = 128,000 (C Table 4)."""


def gemm_seconds(new_tokens: float, hosts: int, capacity: Capacity) -> float:
    """Return the time of the linear layers of the whole model: 2 W T FLOPs (C appendix A)."""
    return 2 * PARAMETERS * new_tokens / (hosts * GPUS_PER_HOST * FIT.gemm_flops * capacity.compute)


def attention_seconds(new_tokens: float, cached_tokens: float, hosts: int, capacity: Capacity) -> float:
    """Return the time of one of a layer's N partial attentions.

    The layer's causal 4 D T (P + T/2) FLOPs are divided over N ranks and N rounds.
    """
    flops = 4 * HIDDEN * new_tokens * (cached_tokens + new_tokens / 2)
    return flops / (hosts * hosts * GPUS_PER_HOST * FIT.attention_flops * capacity.compute)


def send_kv_seconds(total_tokens: float, hosts: int, capacity: Capacity) -> float:
    """Return the time of a pass-KV exchange: K and V of (P + T)/N tokens, one KV head per GPU (C Table 3)."""
    bytes_sent = 2 * total_tokens / hosts * HEAD_DIM * ELEMENT_BYTES * KV_HEADS / GPUS_PER_HOST
    return bytes_sent / (FIT.link_bytes_per_second * capacity.link)


def send_q_seconds(new_tokens: float, hosts: int, capacity: Capacity) -> float:
    """Return the time of a pass-Q exchange: Q of T/N tokens, D/8 wide on each GPU (C Table 3)."""
    bytes_sent = new_tokens / hosts * HIDDEN / GPUS_PER_HOST * ELEMENT_BYTES
    return bytes_sent / (FIT.link_bytes_per_second * capacity.link)


def all2all_seconds(new_tokens: float, hosts: int, capacity: Capacity) -> float:
    """Return the time of pass-Q's All2All, which sends partial outputs and log-sum-exps back to their ranks.

    It is (N - 1)(D + 1) T e / (N BW) (C appendix C).
    """
    width = (HIDDEN + QUERY_HEADS) / GPUS_PER_HOST  # one log-sum-exp per head
    bytes_sent = (hosts - 1) * new_tokens / hosts * width * ELEMENT_BYTES
    return bytes_sent / (FIT.link_bytes_per_second * capacity.link)


def ttft_seconds(
    new_tokens: float, cached_tokens: float, hosts: int, *, pass_q: bool, capacity: Capacity
) -> float:
    """Return the TTFT of a (partial) prefill with ring pass-KV or ring pass-Q over `hosts` hosts."""
    attention = attention_seconds(new_tokens, cached_tokens, hosts, capacity)
    if pass_q:
        send = send_q_seconds(new_tokens, hosts, capacity)
        tail = all2all_seconds(new_tokens, hosts, capacity)
    else:
        send = send_kv_seconds(new_tokens + cached_tokens, hosts, capacity)
        tail = 0.0
    layer = hosts * attention + (hosts - 1) * max(0.0, send - attention) + tail
    return FIT.fixed_seconds + gemm_seconds(new_tokens, hosts, capacity) + LAYERS * layer


def total_flops(tokens: float) -> float:
    """Return the FLOPs of a full causal prefill: GEMM 2 W T and attention 2 T^2 D layers (C appendix A)."""
    return 2 * PARAMETERS * tokens + 2 * tokens**2 * HIDDEN * LAYERS


def _scaled(unit: float, function: Callable[..., float], *arguments: float) -> Callable[[Capacity], float]:
    """Return `function(*arguments, capacity)` in another unit, as a function of only the capacity."""
    return lambda capacity: unit * function(*arguments, capacity)


# --- rows ---------------------------------------------------------------------------------------------


_FITTED = {
    "attention": f"{FIT.attention_flops / 1e12:.0f} TF/s a GPU (C Table 5)",
    "link": f"{FIT.link_bytes_per_second / 1e9:.0f} GB/s a GPU (C Table 5)",
    "GEMM": f"{FIT.gemm_flops / 1e12:.0f} TF/s a GPU (fitted to Table 4)",
    "fixed": f"{FIT.fixed_seconds} s (fitted to Table 4, not scaled by the band)",
}


def t27() -> Row:
    """T27: 1M tokens in 77 s and 128K in 3.8 s on 16 hosts, 5.85 s on 8 (C abstract).

    At 1M tokens that is 502 TF/s per GPU, 63 % of 800 TF/s.
    """

    def full(tokens: float, hosts: int, capacity: Capacity) -> float:
        return ttft_seconds(tokens, 0, hosts, pass_q=False, capacity=capacity)

    def scales(_: float, capacity: Capacity) -> bool:
        """Return whether twice the hosts are faster."""
        return full(128e3, 16, capacity) < full(128e3, 8, capacity)

    def achieved(capacity: Capacity) -> float:
        return total_flops(1e6) / full(1e6, 16, capacity) / 128 / 1e12

    return Row(
        "T27",
        "C abstract, §4.2.3, appendix A",
        "405B: 1M tokens in 77 s on 128 H100, 502 TF/s a GPU, 93 % of 540 standalone, 63 % of 800; 128K in 3.8 s",
        (
            modelled("TTFT of 1M, CP16", "s", 77.0, lambda c: full(1e6, 16, c)),
            modelled("TTFT of 128K, CP16", "s", 3.8, lambda c: full(128e3, 16, c), order=scales),
            modelled("TTFT of 128K, CP8", "s", 5.85, lambda c: full(128e3, 8, c), order=scales),
            modelled("rate at 1M", "TF/s a GPU", 502.0, achieved),
            modelled("parallel efficiency at 1M", "%", 93.0, lambda c: achieved(c) / 5.40),
            modelled("share of the 800 TF/s peak", "%", 63.0, lambda c: achieved(c) / 8.00),
        ),
        _FITTED,
    )


def t28() -> Row:
    """T28: all 28 cells of C Table 4, and the winner of each of its 14 rows.

    The order that C claims for the cells is that TTFT rises with the miss rate (C §4.2.4).
    """
    figures: list[Figure] = []

    def rises(_: float, capacity: Capacity) -> bool:
        return all(
            _partial_prefill_milliseconds(low, capacity, pass_q=pass_q)
            < _partial_prefill_milliseconds(high, capacity, pass_q=pass_q)
            for pass_q in (False, True)
            for (low, *_), (high, *_) in pairwise(TABLE_4)
        )

    for new_tokens, *measured in TABLE_4:
        for pass_q, milliseconds in zip((False, True), measured, strict=True):
            name = f"T = {new_tokens}, {'pass-Q' if pass_q else 'pass-KV'}"
            ours = partial(_partial_prefill_milliseconds, new_tokens, pass_q=pass_q)
            figures.append(modelled(name, "ms", milliseconds, ours, order=rises))
    winners, *at_corners = (
        float(sum(_same_winner(new_tokens, capacity) for new_tokens, *_ in TABLE_4))
        for capacity in (NOMINAL, *CORNERS)
    )
    figures.append(
        Figure(
            "rows with the same winner",
            "of 14",
            (12, 14),
            winners,
            (min(at_corners), max(at_corners)),
            note="either may win at T = 4160 and T = 6400, where the measured times differ by 1.5 % and 0.3 %",
        )
    )
    return Row(
        "T28",
        "C Table 4",
        "TTFT of partial prefill on CP4 by miss rate, pass-KV and pass-Q",
        tuple(figures),
        _FITTED,
    )


def _same_winner(new_tokens: int, capacity: Capacity) -> bool:
    measured = next(row for row in TABLE_4 if row[0] == new_tokens)
    pass_kv, pass_q = (_partial_prefill_milliseconds(new_tokens, capacity, pass_q=q) for q in (False, True))
    return (pass_kv < pass_q) == (measured[1] < measured[2])


def _partial_prefill_milliseconds(new_tokens: int, capacity: Capacity, *, pass_q: bool) -> float:
    """Return the TTFT of `new_tokens` after a cached prefix on CP4."""
    cached = TOTAL_TOKENS - new_tokens
    return 1e3 * ttft_seconds(new_tokens, cached, 4, pass_q=pass_q, capacity=capacity)


def t29() -> Row:
    """T29: times of one ring round (C Table 5)."""

    def returns_more(new_tokens: float, ours: float, capacity: Capacity) -> bool:
        return ours > 1e6 * send_q_seconds(new_tokens, 4, capacity)

    figures = []
    for new, kv_send, q_send, attention, all2all in (
        (3200, 627, 166, 414, 424),
        (12800, 631, 544, 1608, 1023),
    ):
        cached = TOTAL_TOKENS - new
        miss = f"{100 * new / TOTAL_TOKENS:g} % miss"
        figures += [
            modelled(
                f"pass-KV SendRecv, {miss}",
                "us",
                kv_send,
                _scaled(1e6, send_kv_seconds, TOTAL_TOKENS, 4),
            ),
            modelled(
                f"attention, {miss}",
                "us",
                attention,
                _scaled(1e6, attention_seconds, new, cached, 4),
            ),
            modelled(
                f"pass-Q SendRecv, {miss}",
                "us",
                q_send,
                _scaled(1e6, send_q_seconds, new, 4),
                order=lambda ours, c: ours < 1e6 * send_kv_seconds(TOTAL_TOKENS, 4, c),
                note="direction: below pass-KV's; small messages reach less than the fitted bandwidth",
            ),
            modelled(
                f"pass-Q All2All, {miss}",
                "us",
                all2all,
                _scaled(1e6, all2all_seconds, new, 4),
                order=partial(returns_more, new),
                note="direction: above a SendRecv's; one bandwidth cannot give both cells: the paper's own two imply "
                "23 and 38 GB/s",
            ),
        ]
    return Row("T29", "C Table 5", "One ring round at 2.5 % and 10 % miss", tuple(figures), _FITTED)


ALLREDUCE_BYTES_PER_SECOND = 112e9
"""Message size over time of an all-reduce across hosts, fitted to TP16's TTFT of 29,917 ms (C Table 7)."""


def t30() -> Row:
    """T30: TTFT and TTIT of TP and CP by hosts and context (C Tables 6 and 7)."""

    def cp(tokens: float, hosts: int, capacity: Capacity) -> float:
        return 1e3 * ttft_seconds(tokens, 0, hosts, pass_q=False, capacity=capacity)

    def falls(tokens: float, _: float, capacity: Capacity) -> bool:
        """Return whether TTFT falls with each doubling of the hosts."""
        return cp(tokens, 1, capacity) > cp(tokens, 2, capacity) > cp(tokens, 4, capacity)

    def tp(tokens: float, hosts: int, capacity: Capacity) -> float:
        message = tokens * HIDDEN * ELEMENT_BYTES
        exchange = 2 * LAYERS * message / (ALLREDUCE_BYTES_PER_SECOND * capacity.link)
        compute = gemm_seconds(tokens, hosts, capacity) + LAYERS * hosts * attention_seconds(
            tokens, 0, hosts, capacity
        )
        return 1e3 * (FIT.fixed_seconds + compute + exchange)

    def ttit(hosts: int, capacity: Capacity) -> float:
        added = pass_q_microseconds(hosts, capacity) - pass_q_microseconds(1, capacity)
        return 46.26 + 1e-3 * LAYERS * added

    prefill = [
        modelled(f"TTFT {name}", "ms", paper, _scaled(1.0, cp, tokens, hosts), order=partial(falls, tokens))
        for name, tokens, hosts, paper in (
            ("8K TP8", 8e3, 1, 1740),
            ("8K CP2", 8e3, 2, 999),
            ("32K TP8", 32e3, 1, 7658),
            ("32K CP2", 32e3, 2, 4015),
            ("128K TP8", 128e3, 1, 42010),
            ("128K CP2", 128e3, 2, 21042),
            ("128K CP4", 128e3, 4, 10950),
        )
    ]
    prefill.append(
        modelled(
            "TTFT 128K TP32",
            "ms",
            19841,
            lambda c: tp(128e3, 4, c),
            note="TP16 (29,917 ms) is the fitted cell",
        )
    )
    decode = [
        modelled(
            f"TTIT 128K CP{hosts}",
            "ms",
            paper,
            _scaled(1.0, ttit, hosts),
            order=lambda _, c: ttit(1, c) < ttit(2, c) < ttit(4, c),
            note="direction: rises with hosts; TP8's measured 46.26 ms plus what ring attention adds in each layer (T31)"
            + extra,
        )
        for hosts, paper, extra in (
            (2, (60.23, 66.63), "; the paper's Tables 6 and 7 differ"),
            (4, (71.31, 71.31), ""),
        )
    ]
    missing = "time of a small all-reduce over two and four hosts"
    return Row(
        "T30",
        "C Tables 6, 7",
        "TTFT and TTIT of TP8, TP16, TP32, CP2, CP4 at 8K to 128K",
        (
            *prefill,
            *decode,
            untestable("TTIT 128K TP16", "ms", 39.52, missing),
            untestable("TTIT 128K TP32", "ms", 47.3, missing),
        ),
        {
            **_FITTED,
            "all-reduce": f"{ALLREDUCE_BYTES_PER_SECOND / 1e9:.0f} GB/s over hosts (fitted to TP16's TTFT)",
        },
    )


# --- decode -------------------------------------------------------------------------------------------

# Line through the first and last cell of C Table 8: 38.9 us at 128K and 14.7 us at 32K of context per rank.
ATTENTION_BASE_MICROSECONDS = 6.63
ATTENTION_MICROSECONDS_PER_TOKEN = (38.9 - ATTENTION_BASE_MICROSECONDS) / 128_000
# From the CP2 column of C Table 8.
DECODE_SEND_MICROSECONDS = 32.3
DECODE_ALL2ALL_MICROSECONDS = 81.1


def attention_op_microseconds(context: float, capacity: Capacity) -> float:
    """Return the time of one query's decode attention over `context` tokens of one KV head."""
    return ATTENTION_BASE_MICROSECONDS + ATTENTION_MICROSECONDS_PER_TOKEN * context / capacity.bandwidth


def pass_q_microseconds(hosts: int, capacity: Capacity) -> float:
    """Return the time of a layer's ring pass-Q decode at 128K.

    It is N attentions, N - 1 exchanges and one All2All (C §3.6, Table 8).
    """
    attention = hosts * attention_op_microseconds(128_000 / hosts, capacity)
    if hosts == 1:
        return attention
    exchange = (hosts - 1) * DECODE_SEND_MICROSECONDS + DECODE_ALL2ALL_MICROSECONDS
    return attention + exchange / capacity.link


def t31() -> Row:
    """T31: decode attention by hosts (C Table 8, 128K, batch 1)."""
    figures = [
        modelled(
            f"attention op, {hosts} host{'s' * (hosts > 1)}",
            "us",
            paper,
            _scaled(1.0, attention_op_microseconds, 128_000 / hosts),
            note="fitted cell" if hosts != 2 else "",
        )
        for hosts, paper in ((1, 38.9), (2, 22.0), (4, 14.7))
    ]
    figures += [
        modelled(
            f"whole pass-Q, {hosts} hosts",
            "us",
            paper,
            _scaled(1.0, pass_q_microseconds, hosts),
        )
        for hosts, paper in ((2, 157.7), (4, 238.6))
    ]
    return Row(
        "T31",
        "C Table 8",
        "Decode attention at 128K, batch 1: TP8, CP2, CP4",
        tuple(figures),
        {
            "attention": "6.63 us + 0.252 us per 1,000 tokens (through the cells of 1 and 4 hosts)",
            "exchange": "32.3 us a SendRecv, 81.1 us an All2All (both of the CP2 column)",
        },
    )


# --- the choice between pass-KV and pass-Q ---------------------------------------------------------------


def new_tokens_threshold(hosts: int, flops: float, link_bytes_per_second: float) -> float:
    """Return T from which attention hides the exchange of pass-KV: N C N_KV e / (2 N_H BW) (C eq. 2)."""
    return hosts * flops * KV_HEADS * ELEMENT_BYTES / (2 * QUERY_HEADS * link_bytes_per_second)


def miss_rate_threshold() -> float:
    """Return the miss rate from which KV is the smaller message: 2 N_KV / N_H (C eq. 1)."""
    return 2 * KV_HEADS / QUERY_HEADS


def prefers_pass_kv(new_tokens: float, total_tokens: float, hosts: int, capacity: Capacity) -> bool:
    """Return the choice of C algorithm 5, which is algorithm 1 with the All2All of pass-Q added (C eq. 5)."""
    flops = FIT.attention_flops * capacity.compute
    link = FIT.link_bytes_per_second * capacity.link
    adjusted = miss_rate_threshold() - 4 * new_tokens * link / (hosts * flops * ELEMENT_BYTES)
    return new_tokens >= new_tokens_threshold(hosts, flops, link) or new_tokens / total_tokens >= adjusted


def empirical_preference(new_tokens: float, total_tokens: float) -> float:
    """Return h(T, P) = -1.059 ln T + 1.145 ln(T / (T + P)) + 12.112 (C appendix D).

    The paper states that it is positive where pass-KV is better.
    """
    return -1.059 * log(new_tokens) + 1.145 * log(new_tokens / total_tokens) + 12.112


def t32() -> Row:
    """T32: the rules that choose between pass-KV and pass-Q, against the winners of C Table 4."""

    def right(rule_prefers_kv: list[bool]) -> float:
        measured = [kv < q for _, kv, q in TABLE_4]
        return float(sum(a == b for a, b in zip(rule_prefers_kv, measured, strict=True)))

    empirical = right([empirical_preference(new, TOTAL_TOKENS) > 0 for new, *_ in TABLE_4])
    return Row(
        "T32",
        "C §3.4, appendices C and D",
        "pass-KV from T >= N C N_KV e / (2 N_H BW) or a miss rate of 12.5 %; refined by eq. 5; empirical rule of appendix D",
        (
            modelled("miss rate of eq. 1", "%", 12.5, lambda _: 100 * miss_rate_threshold()),
            modelled(
                "T of eq. 2 on CP4 (observed change between 3.25 % and 5 %)",
                "tokens",
                (4160.0, 6400.0),
                lambda c: new_tokens_threshold(4, 540e12 * c.compute, FIT.link_bytes_per_second * c.link),
                note="with 540 TF/s standalone",
            ),
            modelled(
                "winners of Table 4 that algorithm 5 names",
                "of 14",
                (12.0, 14.0),
                lambda c: right([prefers_pass_kv(new, TOTAL_TOKENS, 4, c) for new, *_ in TABLE_4]),
                note="T = 4160 and 6400 are within 1.5 % of a tie",
            ),
            Figure(
                "winners of Table 4 that appendix D's formula names",
                "of 14",
                (12.0, 14.0),
                empirical,
                (empirical, empirical),
                note="with the coefficients as printed and natural logarithms h is negative in every row of Table 4, "
                "so it never chooses pass-KV",
            ),
        ),
        {**_FITTED, "N": "4 hosts"},
    )


ROWS = (t27, t28, t29, t30, t31, t32)
