"""Attention and its merge: equal to a plain float64 softmax, and never NaN for a row that sees nothing."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from hypothesis import given, settings
from hypothesis import strategies as st

from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.device import Device, InOrder, host_device
from medha_worker.host_memory import HostMemory
from medha_worker.kernels import torch_attention as attention
from medha_worker.kernels import torch_flash as flash
from medha_worker.kernels.cpu import compiled_attention as cpu_attention
from medha_worker.kernels.cpu.compiled_attention import CpuAttention
from medha_worker.kernels.cpu.compiled_rows import CompiledRows
from medha_worker.kernels.cpu.helper_team import HelperTeam
from medha_worker.kernels.cpu.host_compiler import Target
from medha_worker.kernels.name_table import KERNELS, choose_kernels
from medha_worker.kernels.partial_results import merge_partials
from medha_worker.kernels.protocol import AttentionBackend, KernelSizes, KernelsUnavailable
from medha_worker.kernels.sequence_span import SequenceSpan, SlotRun, slot_runs
from medha_worker.kernels.torch_attention import TorchAttention
from medha_worker.kernels.torch_flash import flash_attention
from medha_worker.kernels.torch_rows import TorchRows
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.weights import Shard

BLOCK_TOKENS = 16
SLOTS = 8192
META = torch.device("meta")


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(q k^T) v and the log-sum-exp, in float64."""
    scores = q.double() @ k.double().transpose(-1, -2)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ v.double(), scores.logsumexp(-1)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# merge_partials


@given(
    cuts=st.lists(st.integers(0, 24), min_size=0, max_size=6),
    spread=st.sampled_from([0.1, 3.0, 200.0]),
    shift=st.sampled_from([0.0, -500.0, 1000.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_merging_any_split_of_the_keys_gives_the_attention_over_all_of_them(
    cuts: list[int], spread: float, shift: float, seed: int
) -> None:
    """Some shards are empty, because cuts may coincide; scores may be far from zero."""
    keys = 24
    scores = (normal(3, keys, seed=seed) * spread + shift).double()
    values = normal(keys, 5, seed=seed + 1).double()
    edges = [0, *sorted(cuts), keys]
    outputs, sums = [], []
    for first, last in pairwise(edges):
        part = scores[:, first:last]
        sums.append(part.logsumexp(-1).float())
        outputs.append((part.softmax(-1) @ values[first:last]).float())  # zeros of an empty shard
    output, log_sum_exp = merge_partials(outputs, sums)
    torch.testing.assert_close(output.double(), scores.softmax(-1) @ values, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(log_sum_exp.double(), scores.logsumexp(-1), rtol=1e-6, atol=1e-5)


def test_merging_only_empty_shards_gives_zeros_and_minus_infinity() -> None:
    nothing = torch.full((2, 3), -math.inf)
    output, log_sum_exp = merge_partials([torch.zeros(2, 3, 4)] * 3, [nothing] * 3)
    assert output.eq(0).all()
    assert log_sum_exp.eq(-math.inf).all()


def test_one_empty_shard_alone_is_zeros_too() -> None:
    output, log_sum_exp = merge_partials([torch.zeros(3, 4)], [torch.full((3,), -math.inf)])
    assert output.eq(0).all()
    assert log_sum_exp.eq(-math.inf).all()


def test_a_row_that_one_shard_does_not_see_takes_the_others_result_unchanged() -> None:
    seen, sums = normal(2, 4), torch.tensor([0.3, -90.0])
    unseen, nothing = torch.zeros(2, 4), torch.full((2,), -math.inf)
    for outputs, parts in (([seen, unseen], [sums, nothing]), ([unseen, seen], [nothing, sums])):
        output, log_sum_exp = merge_partials(outputs, parts)
        assert torch.equal(output, seen)
        assert torch.equal(log_sum_exp, sums)


def test_a_row_for_which_memory_ran_out_stays_not_a_number() -> None:
    """This holds in any order of the merge, and beside an empty set."""
    lost, nothing = torch.full((1,), math.nan), torch.full((1,), -math.inf)
    for sums in ([lost, torch.zeros(1)], [torch.zeros(1), lost], [nothing, lost], [lost, nothing]):
        outputs = [part.expand(1, 4).nan_to_num(neginf=0.0, nan=math.nan) for part in sums]
        assert merge_partials(outputs, sums)[0].isnan().all()


def test_merged_bfloat16_outputs_stay_bfloat16_and_sums_float32() -> None:
    output, log_sum_exp = merge_partials([normal(2, 4).bfloat16()] * 2, [torch.zeros(2)] * 2)
    assert output.dtype == torch.bfloat16
    assert log_sum_exp.dtype == torch.float32


# The flash kernel and its fallback


@pytest.fixture(params=["operator", "stand-in"])
def flash_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "stand-in":
        monkeypatch.setattr(flash, "HAS_OPERATOR", False)
        monkeypatch.setattr(flash, "_STAND_IN_SCORES", 200)  # several pieces
    elif not flash.HAS_OPERATOR:
        pytest.skip("this torch has no such operator, or another signature")
    return str(request.param)


def test_this_torch_has_the_operator_with_the_signature_we_call() -> None:
    """This fails if a new torch changes the private operator: then the fallback keeps results right, but is slow."""
    assert flash.HAS_OPERATOR


@pytest.mark.usefixtures("flash_kind")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(
    ("rows", "keys", "causal"), [(1, 1, False), (1, 70, False), (9, 33, False), (40, 40, True)]
)
def test_flash_attention_is_exact_and_its_log_sum_exp_natural(
    dtype: torch.dtype, tolerance: float, rows: int, keys: int, causal: bool
) -> None:
    q, k, v = (
        normal(2, 4, rows, 8).to(dtype),
        normal(2, 4, keys, 8, seed=1).to(dtype),
        normal(2, 4, keys, 8, seed=2).to(dtype),
    )
    hidden = torch.ones(rows, keys, dtype=torch.bool).triu_(1) if causal else None
    output, log_sum_exp = flash_attention(q, k, v, scale=0.5, causal=causal)
    wanted, wanted_sum = plain_attention(q.double() * 0.5, k, v, hidden)
    assert output.dtype == dtype
    assert log_sum_exp.dtype == torch.float32
    torch.testing.assert_close(output.double(), wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(log_sum_exp.double(), wanted_sum, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("flash_kind")
@pytest.mark.parametrize(("rows", "keys", "causal"), [(0, 5, False), (5, 0, False), (3, 5, True)])
def test_input_that_would_crash_or_misalign_the_operator_is_stopped(
    rows: int, keys: int, causal: bool
) -> None:
    q, k = torch.zeros(1, 1, rows, 8), torch.zeros(1, 1, keys, 8)
    with pytest.raises(AssertionError):
        flash_attention(q, k, k, scale=1.0, causal=causal)


# The backends


def compiled(head_dim: int, group: int) -> CpuAttention:
    return CpuAttention(head_dim, group, HelperTeam())


def run_backend(
    backend: AttentionBackend,
    spans: list[SequenceSpan],
    kv_heads: int,
    group: int,
    dtype: torch.dtype = torch.float32,
    *,
    head_dim: int = 16,
    level: Callable[[int], float] = lambda token: 0.0,
    window_tokens: int | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a backend over a random pool; return its result and the plain one. `level` adds to a key position's scores."""
    slots = SLOTS
    rows = sum(span.row_count for span in spans)
    keys, values = (
        normal(kv_heads, slots, head_dim, seed=1).to(dtype),
        normal(kv_heads, slots, head_dim, seed=2).to(dtype),
    )
    q = normal(rows, kv_heads * group, head_dim, seed=3).to(dtype)
    q[..., 0] = math.sqrt(head_dim)  # scores are divided by it
    keys[..., 0] = 0
    for span in spans:
        for token in range(span.total_length):
            block, offset = divmod(token, BLOCK_TOKENS)
            keys[:, span.blocks[block] * BLOCK_TOKENS + offset, 0] = level(token)
    wanted = torch.empty(rows, kv_heads * group, head_dim, dtype=torch.float64)
    wanted_sums = torch.empty(rows, kv_heads * group, dtype=torch.float64)
    for span in spans:
        positions = np.arange(span.total_length)
        place = torch.from_numpy(
            np.asarray(span.blocks)[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
        )
        part = span.rows
        seen = np.full(span.row_count, span.total_length)
        if span.is_causal:
            seen = span.context_length + 1 + span.stride * np.arange(span.row_count)
        hidden = torch.from_numpy(positions >= seen[:, None])
        if window_tokens is not None:
            hidden |= torch.from_numpy(positions < seen[:, None] - window_tokens)
        firsts = span.first_key + span.first_stride * np.arange(span.row_count)
        hidden |= torch.from_numpy(positions < firsts[:, None])
        by_head = q[part].transpose(0, 1) / math.sqrt(head_dim)
        repeated = [pool[:, place].repeat_interleave(group, dim=0) for pool in (keys, values)]
        if (
            sinks is not None
        ):  # one key more: its score is the sink, whatever the query, and its value is zero
            by_head = torch.cat([by_head, sinks[:, None, None].expand(-1, span.row_count, 1)], dim=2).double()
            one = F.one_hot(torch.tensor(head_dim), head_dim + 1).double()
            repeated[0] = torch.cat(
                [F.pad(repeated[0].double(), (0, 1)), one.expand(len(sinks), 1, -1)], dim=1
            )
            repeated[1] = F.pad(repeated[1].double(), (0, 0, 0, 1))
            hidden = F.pad(hidden, (0, 1))
        output, log_sum_exp = plain_attention(by_head, repeated[0], repeated[1], hidden)
        wanted[part], wanted_sums[part] = output.transpose(0, 1), log_sum_exp.transpose(0, 1)
    found, sums = backend.plan(spans, BLOCK_TOKENS, window_tokens).attend(q, keys, values, sinks)
    torch.testing.assert_close(sums.double(), wanted_sums, rtol=1e-3, atol=1e-3)
    return found.double(), wanted


def spans_of(shapes: list[tuple[int, int]], *, shuffled: bool) -> list[SequenceSpan]:
    """Return spans of (context, new tokens) in row order; block tables are in order or shuffled.

    Every other span with a context belongs to a sequence that continues in another pool. Of some others, two positions
    of three are computed elsewhere.
    """
    blocks = list(range(SLOTS // BLOCK_TOKENS))
    if shuffled:
        np.random.default_rng(0).shuffle(blocks)
    spans, row = [], 0
    for context, count in shapes:
        is_causal = context == 0 or len(spans) % 2 == 0
        stride = 3 if is_causal and len(spans) % 3 == 1 else 1
        needed = -(-(context + stride * count) // BLOCK_TOKENS)
        spans.append(SequenceSpan(row, count, context, blocks[:needed], is_causal, stride))
        blocks, row = blocks[needed:], row + count
    return spans


SHAPES = [
    (0, 1),
    (0, 5),
    (33, 1),
    (0, 300),
    (40, 260),
    (700, 3),
    (1000, 1),
    (600, 130),
    (48, 1),
    (200, 9),
    (65, 90),
]


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (2, 4), (3, 2), (8, 1)])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 3e-2)])
def test_every_case_of_the_torch_backend_equals_a_plain_softmax(
    kv_heads: int, group: int, shuffled: bool, dtype: torch.dtype, tolerance: float
) -> None:
    spans = spans_of(SHAPES, shuffled=shuffled)
    found, wanted = run_backend(TorchAttention(host_device(torch.float32)), spans, kv_heads, group, dtype)
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["torch", "compiled"])
@pytest.mark.parametrize("window_tokens", [None, 1, 2, 16, 100, 2000])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_windows_and_sinks_equal_a_plain_softmax(
    kind: str, window_tokens: int | None, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "_STAND_IN_SCORES", 100_000)  # several pieces
    monkeypatch.setattr(cpu_attention, "_SPLIT_KEYS", 200)
    backend = TorchAttention(host_device(torch.float32)) if kind == "torch" else compiled(16, 2)
    spans = spans_of(SHAPES, shuffled=True)
    if window_tokens is not None:
        spans = [replace(span, is_causal=True) for span in spans]
    sinks = normal(4, seed=5) * 4 if has_sinks else None
    found, wanted = run_backend(backend, spans, 2, 2, window_tokens=window_tokens, sinks=sinks)
    torch.testing.assert_close(found, wanted, rtol=5e-6, atol=5e-6)


@given(
    shapes=st.lists(
        st.tuples(
            st.integers(1, 90),  # tokens before the first row
            st.integers(1, 40),  # rows
            st.booleans(),  # whether the rows' own tokens are in this pool
            st.integers(1, 3),  # stride
            st.integers(-50, 90),  # first key of the first row
            st.integers(0, 3),  # stride of the first keys
        ),
        min_size=1,
        max_size=4,
    ),
    kind=st.sampled_from(["torch", "compiled", "invariant"]),
)
@settings(max_examples=60)
def test_rows_whose_spans_say_where_each_ones_window_begins_equal_a_plain_softmax(
    shapes: list[tuple[int, int, bool, int, int, int]], kind: str
) -> None:
    """A lane that holds a part of a context sees windows begin and end at any place, moving or not."""
    spans, row, block = [], 0, SLOTS // BLOCK_TOKENS
    for context, wanted, is_causal, stride, first, step in shapes:
        first = min(first, context if is_causal else context - 1)
        slope = stride if is_causal else 0
        count = wanted
        while first + (count - 1) * step > context + (count - 1) * slope - (not is_causal):
            count -= 1
        needed = -(-(context + stride * count) // BLOCK_TOKENS)
        block -= needed
        table = list(range(block, block + needed))[::-1]
        spans.append(SequenceSpan(row, count, context, table, is_causal, stride, first, step))
        row += count
    backend = (
        TorchAttention(host_device(torch.float32))
        if kind == "torch"
        else CpuAttention(16, 2, HelperTeam(), invariant=kind == "invariant")
    )
    found, plain = run_backend(backend, spans, 2, 2)
    torch.testing.assert_close(found, plain, rtol=5e-6, atol=5e-6)


def test_a_window_over_a_context_alone_is_refused_because_its_rows_stand_nowhere() -> None:
    span = SequenceSpan(3, 2, 20, [0, 1], is_causal=False)
    for backend in (TorchAttention(host_device(torch.float32)), compiled(16, 1)):
        with pytest.raises(ValueError, match="rows 3 to 4 see a context alone"):
            backend.plan([span], BLOCK_TOKENS, 8)


def test_gathering_in_several_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_GATHERED_TOKENS", 64)
    found, wanted = run_backend(
        TorchAttention(host_device(torch.float32)), spans_of(SHAPES, shuffled=True), 2, 2
    )
    torch.testing.assert_close(found, wanted, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim"),
    [(1, 1, 16), (2, 4, 64), (3, 2, 16), (8, 1, 80), (1, 7, 128), (2, 9, 48), (1, 6, 32)],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_every_case_of_the_compiled_kernel_equals_a_plain_softmax(
    kv_heads: int, group: int, head_dim: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some groups do not fill a block of rows, and some head dimensions do not fill a block of registers."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    monkeypatch.setattr(
        cpu_attention, "_SPLIT_KEYS", 200
    )  # on two threads, decodes are split into several parts
    try:
        spans = spans_of(SHAPES, shuffled=True)
        backend = compiled(head_dim, group)
        found, wanted = run_backend(backend, spans, kv_heads, group, head_dim=head_dim)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, wanted, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("lanes", [Target(4, 4, 4), Target(8, 2, 6), Target(16, 4, 6)])
def test_the_kernel_is_right_for_every_length_of_vector(
    lanes: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLVM compiles every vector length for this machine, whatever registers it has."""
    monkeypatch.setattr(Target, "of_host", classmethod(lambda cls: lanes))
    cpu_attention.compiled_kernel.cache_clear()
    try:
        found, wanted = run_backend(compiled(16, 4), spans_of(SHAPES, shuffled=False), 2, 4)
    finally:
        cpu_attention.compiled_kernel.cache_clear()
    torch.testing.assert_close(found, wanted, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize(
    ("levels", "case"),
    [
        ((0.0, 0.0), "small scores: no constant"),
        ((60.0, 60.0), "the first tile's maximum is the constant"),
        ((-70.0, -70.0), "all scores so low that exp() alone would lose them"),
        ((0.0, 120.0), "a later tile overflows without a constant"),
        ((300.0, 600.0), "a later tile overflows in spite of the constant"),
        ((0.0, -200.0), "a later tile adds nothing"),
        ((-300.0, 0.0), "the first tile adds nothing"),
    ],
)
def test_the_kernel_is_exact_wherever_the_scores_lie(levels: tuple[float, float], case: str) -> None:
    """One query dimension is 1 and the keys' hold a level, so that whole tiles lie far above or below others."""
    found, wanted = run_backend(
        compiled(16, 2), spans_of(SHAPES, shuffled=True), 2, 2, level=lambda token: levels[token >= 64]
    )
    # A score of 600 is known to 6e-5 in float32, and so is the logarithm of its weight.
    torch.testing.assert_close(found, wanted, rtol=3e-4, atol=3e-4, msg=case)


def test_the_kernel_is_chosen_for_float32_on_a_cpu_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init_checkpoint(tmp_path / "tiny", preset="tiny", seed=0)
    config = ModelConfig.from_directory(tmp_path / "tiny")
    sizes = Shard.whole(config).kernel_sizes(config)
    cpu = host_device(torch.float32)
    chosen = choose_kernels(sizes, cpu)
    assert (chosen.name, type(chosen.attention), type(chosen.rows)) == ("cpu", CpuAttention, CompiledRows)
    uneven = choose_kernels(replace(sizes, intermediate_size=sizes.intermediate_size + 1), cpu)
    assert (uneven.name, type(uneven.attention), type(uneven.rows)) == ("cpu", CpuAttention, TorchRows)

    def refused(reason: str, sizes: KernelSizes, device: Device) -> None:
        plain = choose_kernels(sizes, device)
        assert (plain.name, type(plain.attention), type(plain.rows)) == ("torch", TorchAttention, TorchRows)
        with pytest.raises(KernelsUnavailable, match=reason):
            KERNELS["cpu"](sizes, device)

    refused("the model runs in torch.bfloat16", sizes, host_device(torch.bfloat16))
    refused("the device is meta", sizes, Device(META, torch.float32, HostMemory(), InOrder(META)))
    refused("heads of 20 values", replace(sizes, head_dim=20), cpu)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "medha_worker.kernels.cpu.compiled_kernels", None)
        refused("llvmlite, cannot be imported", sizes, cpu)


# Slots of tokens


@given(
    blocks=st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True),
    bounds=st.tuples(st.integers(0, 12 * 4), st.integers(0, 12 * 4)),
)
def test_slot_runs_are_the_tokens_slots_in_order_and_as_long_as_they_can_be(
    blocks: list[int], bounds: tuple[int, int]
) -> None:
    first, last = sorted(min(bound, len(blocks) * 4) for bound in bounds)
    slots = [blocks[token // 4] * 4 + token % 4 for token in range(first, last)]
    for table in (blocks, np.array(blocks)):
        runs = slot_runs(SequenceSpan(0, 1, 0, table), first, last, 4)
        assert [slot for run in runs for slot in range(run.start, run.stop)] == slots
        assert all(before.stop != after.start for before, after in pairwise(runs))
        assert all(isinstance(run, SlotRun) and run.tokens > 0 for run in runs)
