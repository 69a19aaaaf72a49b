"""FlashInfer's adapter on a double equals plain torch, calls what the real package has, and waits before it overwrites."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from importlib import util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from medha_worker.device import HOST, Device, InOrder, host_device
from medha_worker.host_memory import HostMemory
from medha_worker.kernels.flashinfer import flashinfer_attention, flashinfer_kernels
from medha_worker.kernels.flashinfer.flashinfer_attention import FlashInferAttention, ScaledPool
from medha_worker.kernels.flashinfer.flashinfer_kernels import wide_rows
from medha_worker.kernels.flashinfer.flashinfer_rows import FlashInferRows
from medha_worker.kernels.name_table import KERNELS, choose_kernels
from medha_worker.kernels.protocol import KernelSizes, KernelsUnavailable
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.kernels.torch_attention import TorchAttention
from medha_worker.kernels.torch_rows import TorchRows

from .computing_device import Computing, computing_device, on_device, on_host
from .flashinfer_cases import HEAD_DIM, Case, Chunk, adapter, assert_equals_torch, attended, cases
from .flashinfer_defects import STEPS
from .flashinfer_double import FlashInferDouble
from .flashinfer_signatures import CALLED, differences, recorded


@given(case=cases())
def test_the_adapter_equals_plain_torch_in_every_step_that_can_be_planned(case: Case) -> None:
    assert_equals_torch(case, attended(case, adapter(case, FlashInferDouble())))


def test_rows_of_each_kind_may_lie_apart() -> None:
    """The engine's steps begin with decodes, but lanes that serve others put theirs behind."""
    kinds = [
        Chunk(1, 9),
        Chunk(5, 3),
        Chunk(1, 20),
        Chunk(4, 7, is_causal=False),
        Chunk(3, 0),
        Chunk(2, 8, False),
    ]
    case = Case(kinds, block_tokens=4)
    assert_equals_torch(case, attended(case, adapter(case, FlashInferDouble())))


@pytest.mark.parametrize("case", [*STEPS, Case([Chunk(1, 9), Chunk(1, 30)])])
def test_log_sum_exps_are_converted_only_where_something_needs_them(case: Case) -> None:
    """Results are the same without, also those that are merged within the step, and those that sinks are added to."""
    q, keys, values, sinks = (None if one is None else on_device(one) for one in case.tensors())
    attention = adapter(case, FlashInferDouble())
    steps = [attention.plan(case.spans(), case.block_tokens, case.window_tokens)]
    if all(chunk.rows == 1 for chunk in case.chunks):
        graph = attention.for_graph(len(case.chunks), case.blocks())
        graph.replan(case.spans(), case.block_tokens)
        steps.append(graph)
    for step in steps:
        output, sums = map(on_host, step.attend(q, keys, values, sinks))
        found, without = map(on_host, step.attend(q, keys, values, sinks, needs_sums=False))
        assert torch.equal(found, output)
        torch.testing.assert_close(without * (1 if case.has_sinks else math.log(2)), sums)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("version", recorded())
def test_a_pool_of_fp8_is_read_with_its_scales(dtype: torch.dtype, version: str) -> None:
    double = FlashInferDouble(signatures=recorded()[version])
    pool = ScaledPool(dtype, key_scale=0.5, value_scale=3.0)
    for case in [*STEPS, Case([Chunk(1, 9), Chunk(1, 30)])]:
        q, keys, values, sinks = case.tensors()
        keys, values = keys.to(dtype), values.to(dtype)
        device = computing_device(case.dtype, double.work)
        attention = FlashInferAttention(double, device, case.sizes, scaled_pool=pool)
        plain = TorchAttention(host_device(torch.float32))
        wanted = plain.plan(case.spans(), case.block_tokens, case.window_tokens).attend(
            q.float(), keys.float() * pool.key_scale, values.float() * pool.value_scale, sinks
        )
        steps: list[Any] = [attention.plan(case.spans(), case.block_tokens, case.window_tokens)]
        if all(chunk.rows == 1 for chunk in case.chunks):
            steps.append(attention.for_graph(len(case.chunks), case.blocks()))
            steps[1].replan(case.spans(), case.block_tokens)
        for step in steps:
            on = None if sinks is None else on_device(sinks)
            output, sums = map(on_host, step.attend(on_device(q), on_device(keys), on_device(values), on))
            torch.testing.assert_close(output.float(), wanted[0], rtol=2e-2, atol=4e-2)
            torch.testing.assert_close(sums, wanted[1], rtol=1e-5, atol=1e-4)
        with pytest.raises(AssertionError, match=r"K is torch\.bfloat16, and torch\.float8"):
            steps[0].attend(on_device(q), on_device(keys.to(q.dtype)), on_device(values), None)


def test_a_pool_of_fp8_needs_an_implementation_and_a_type_that_can_be_read() -> None:
    double = FlashInferDouble()
    device = computing_device(torch.bfloat16, double.work)
    with pytest.raises(ValueError, match="wide_rows is 256, and has to be None with scaled_pool"):
        FlashInferAttention(
            double,
            device,
            STEPS[0].sizes,
            wide_rows=256,
            scaled_pool=ScaledPool(torch.float8_e4m3fn, 1.0, 1.0),
        )
    with pytest.raises(ValueError, match=r"scaled_pool has torch\.int8"):
        FlashInferAttention(double, device, STEPS[0].sizes, scaled_pool=ScaledPool(torch.int8, 1.0, 1.0))


@pytest.mark.parametrize("version", recorded())
def test_every_call_of_the_adapter_fits_the_recorded_signature(version: str) -> None:
    double = FlashInferDouble(signatures=recorded()[version])
    for case in STEPS:
        attended(case, adapter(case, double))
    graph = adapter(STEPS[0], double).for_graph(1, 2)
    graph.replan([SequenceSpan(0, 1, 2, [1])], 4)
    rows = FlashInferRows(double, TorchRows())
    x = on_device(torch.ones(2, 3, HEAD_DIM).half())
    rows.rms_norm(x, on_device(torch.ones(HEAD_DIM).half()), 1e-5)
    rows.rotate(x, on_device(torch.ones(2, HEAD_DIM // 2)), on_device(torch.ones(2, HEAD_DIM // 2)))
    rows.add_rms_norm(x[0], x[1], on_device(torch.ones(HEAD_DIM).half()), 1e-5)
    rows.silu_multiply(x.flatten(1)[:, :64])
    assert double.called == set(CALLED)


def test_a_call_that_does_not_fit_is_noticed() -> None:
    double = FlashInferDouble(signatures=recorded()["0.6.13"])
    with pytest.raises(TypeError, match="lse_base"):
        double.bind("BatchPrefillWithPagedKVCacheWrapper.run", None, None, None, lse_base="ln")


@pytest.mark.skipif(util.find_spec("flashinfer") is None, reason="the extra gpu is not installed")
def test_the_installed_version_has_the_recorded_signatures() -> None:
    import flashinfer

    assert differences(flashinfer) == []


# Plans ahead


def test_a_plan_takes_no_wrapper_that_the_device_still_reads() -> None:
    """The double raises if it is planned over its own unfinished work."""
    case = Case([Chunk(1, 9), Chunk(6, 4), Chunk(3, 2, stride=2)])
    double = FlashInferDouble()
    attention = adapter(case, double)
    ahead = attention.plan(case.spans(), case.block_tokens)
    for _ in range(5):
        step, ahead = ahead, attention.plan(case.spans(), case.block_tokens)
        assert_equals_torch(case, attended(case, attention, step))
        del step
        gc.collect()
    assert {wrapper.plans for wrapper in double.wrappers} == {1}, "nothing was finished meanwhile"


def test_two_sets_of_wrappers_take_turns_when_each_step_ends_before_the_one_after_the_next_is_planned() -> (
    None
):
    case = Case([Chunk(1, 9), Chunk(6, 4)])
    double = FlashInferDouble()
    attention = adapter(case, double)
    ahead = attention.plan(case.spans(), case.block_tokens)
    for _ in range(6):
        step, ahead = ahead, attention.plan(case.spans(), case.block_tokens)
        attended(case, attention, step)
        del step
        double.work.finish()
    assert len(double.wrappers) == 2 * 2
    assert sum(wrapper.plans for wrapper in double.wrappers) == 2 * 7


def test_a_step_that_is_planned_and_never_run_does_not_cost_a_wrapper() -> None:
    case = Case([Chunk(1, 9)])
    double = FlashInferDouble()
    attention = adapter(case, double)
    for _ in range(3):
        attention.plan(case.spans(), case.block_tokens)
        double.work.finish()
    assert len(double.wrappers) == 1


# Graphs


def test_captured_decodes_are_replanned_in_place() -> None:
    """Padded rows see one token of a scratch block, the last of the pool; the batch has one size."""
    double = FlashInferDouble()
    case = Case([Chunk(1, 9), Chunk(1, 0), Chunk(1, 14)], has_sinks=True)
    graph = adapter(case, double).for_graph(3, 16)
    for contexts in ((2, 0, 0), (9, 0, 14), (1, 3, 0)):
        case = replace(case, chunks=[Chunk(1, context) for context in contexts])
        graph.replan(case.spans(), case.block_tokens)
        assert_equals_torch(case, attended(case, None, graph))
    assert [wrapper.plans for wrapper in double.wrappers] == [3]
    with pytest.raises(AssertionError, match="other rows than 3 decodes"):
        graph.replan(case.spans()[:2], case.block_tokens)
    with pytest.raises(AssertionError, match="and space for 16"):
        graph.replan([SequenceSpan(row, 1, 39, np.arange(10)) for row in range(3)], 4)


def test_memory_for_partial_results_grows_with_the_captured_rows_and_is_shared() -> None:
    double = FlashInferDouble()
    attention = adapter(Case([Chunk(1, 1)], group=7), double)
    first = attention.pool.partials_of_decodes(8)
    assert attention.pool.partials_of_decodes(16) is first
    assert len(first) == 128 << 20
    rows = 4000
    larger = attention.pool.partials_of_decodes(rows)
    tiles = rows * 7 / 16 + rows  # of 16 rows of heads, at most one for each row more than it takes
    assert len(larger) >= tiles * 16 * 14 * (HEAD_DIM + 1) * 4
    assert attention.pool.partials_of_decodes(rows) is larger
    assert attention.pool.partials_of_decodes(8) is larger


# What would be accepted in silence


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q.float(), k, v), "q is torch.float32, and torch.bfloat16 was planned"),
        (lambda q, k, v: (q, k, v.transpose(0, 1).contiguous().transpose(0, 1)), "strides of K"),
        (lambda q, k, v: (q, *(one.transpose(0, 1).contiguous() for one in (k, v))), "q is|share"),
        (lambda q, k, v: (q[:, :3], k, v), "4 heads were planned"),
        (lambda q, k, v: (q, k[:, :-1], v[:, :-1]), "no whole number of pages"),
        (lambda q, k, v: (q, k[:, :8], v[:, :8]), "lies outside a pool of 2 pages"),
        (lambda q, k, v: (q, *(one.mT.contiguous().mT for one in (k, v))), "gaps within a head"),
    ],
)
def test_tensors_that_would_be_misread_are_refused(change: object, message: str) -> None:
    case = Case([Chunk(1, 9), Chunk(6, 20)])
    step = adapter(case, FlashInferDouble()).plan(case.spans(), case.block_tokens)
    q, keys, values, _ = case.tensors()
    with pytest.raises(AssertionError, match=message):
        step.attend(*(on_device(one) for one in change(q, keys, values)))  # type: ignore[operator]


# Rows


@pytest.fixture
def rows() -> FlashInferRows:
    return FlashInferRows(FlashInferDouble(), TorchRows())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_equal_plain_torch(rows: FlashInferRows, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    plain, close = TorchRows(), {"rtol": 2e-2, "atol": 2e-2}
    for x in (normal(5, 96), normal(5, 6, 96)[:, 1:4]):
        weight = normal(96)
        found = rows.rms_norm(on_device(x), on_device(weight), 1e-5)
        torch.testing.assert_close(on_host(found), plain.rms_norm(x, weight, 1e-5), **close)
    hidden, part, weight = normal(9, 96), normal(5, 96), normal(96)
    changed, memory = on_device(hidden.clone()), on_device(part.clone())
    found = rows.add_rms_norm(changed[2:7], memory, on_device(weight), 1e-5)
    hidden[2:7] += part
    torch.testing.assert_close(on_host(changed), hidden, **close)
    torch.testing.assert_close(on_host(found), plain.rms_norm(hidden[2:7], weight, 1e-5), **close)
    assert found.data_ptr() == memory.data_ptr()
    gate_up = normal(5, 200)[:, :192]
    found = rows.silu_multiply(on_device(gate_up))
    torch.testing.assert_close(on_host(found), plain.silu_multiply(gate_up.clone()), **close)
    for count in (1, 2, 5):
        heads, angles = normal(7, 8, HEAD_DIM), torch.randn(7, HEAD_DIM // 2, generator=random) * 9
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        turned, wanted = on_device(heads.clone()), heads.clone()
        rows.rotate(turned[:, 2 : 2 + count], on_device(cos), on_device(sin))
        plain.rotate(wanted[:, 2 : 2 + count], cos, sin)
        torch.testing.assert_close(on_host(turned), wanted, **close)


class Tables(FlashInferDouble):
    """Keeps the tables of angles that it is given."""

    def apply_rope_with_cos_sin_cache_inplace(self, *args: Any, **kwargs: Any) -> None:
        self.wrappers.append(args[4])
        super().apply_rope_with_cos_sin_cache_inplace(*args, **kwargs)


def test_the_tables_of_two_rotations_are_made_once_for_all_layers_and_anew_for_other_angles() -> None:
    library = Tables()
    rows, heads = FlashInferRows(library, TorchRows()), on_device(torch.ones(3, 2, HEAD_DIM).half())
    for angles in ((0.0, 1.0), (2.0, 3.0)):
        steps = [
            tuple(on_device(torch.full((4, HEAD_DIM // 2), angle)) for _ in range(2)) for angle in angles
        ]
        for _layer in range(2):
            for cos, sin in steps:
                rows.rotate(heads, cos[:3], sin[:3])  # the model passes a new view in each layer
    for angle, first in enumerate((0, 1, 4, 5)):
        assert library.wrappers[first] is library.wrappers[first + 2]
        assert on_host(library.wrappers[first]).eq(angle).all()


# The choice


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    about = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)


SIZES = KernelSizes(8, 2, 128, 1024, 4096)


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize(
    ("sizes", "device", "dtype", "reason"),
    [
        (SIZES, "cpu", torch.bfloat16, "the device is cpu"),
        (SIZES, "cuda:0", torch.float32, "the model runs in torch.float32"),
        (
            replace(SIZES, head_dim=80),
            "cuda:0",
            torch.bfloat16,
            "heads of 64, 128, 256 values, and the model's have 80",
        ),
        (
            SIZES,
            "cuda:0",
            torch.bfloat16,
            r"cannot be imported \(ModuleNotFoundError: .*the extra medha\[gpu\]",
        ),
    ],
)
def test_kernels_that_cannot_run_say_why(
    sizes: KernelSizes, device: str, dtype: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(flashinfer_kernels, "import_module", missing)
    with pytest.raises(KernelsUnavailable, match=reason):
        KERNELS["flashinfer"](sizes, Device(torch.device(device), dtype, HostMemory(), InOrder(HOST)))


@pytest.mark.parametrize("wide_rows", [1, 4])
def test_chunks_of_many_rows_without_a_window_or_a_mask_run_on_another_kernel(wide_rows: int) -> None:
    for case in STEPS:
        double = FlashInferDouble()
        device = computing_device(case.dtype, double.work)
        attention = FlashInferAttention(double, device, case.sizes, wide_rows=wide_rows)
        assert_equals_torch(case, attended(case, attention))
        plain = [one for one in case.spans() if one.row_count > 1 and one.stride == 1 and not one.has_window]
        is_wide = case.window_tokens is None and any(one.row_count >= wide_rows for one in plain)
        if is_wide or case.window_tokens is not None:
            assert ("fa3" in {one.backend for one in double.wrappers}) == is_wide, case


def test_the_kernel_for_many_rows_is_chosen_where_its_tiles_fill_the_gpu() -> None:
    of_llama = replace(SIZES, query_heads=32)
    assert wide_rows(of_llama, (9, 0), 132) == 396  # 99 tiles of 128 rows of 32 heads, for 132 processors
    assert wide_rows(SIZES, (9, 0), 132) == 4 * 396
    assert wide_rows(of_llama, (8, 0), 108) is None
    assert wide_rows(of_llama, (10, 0), 148) is None
    assert wide_rows(replace(of_llama, head_dim=64), (9, 0), 132) is None
    assert wide_rows(replace(of_llama, has_fp8_kv=True), (9, 0), 132) is None


@pytest.mark.usefixtures("_gpu")
def test_without_the_kernel_for_many_rows_the_others_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    double = FlashInferDouble()
    monkeypatch.setattr(flashinfer_kernels, "import_module", lambda _: double)
    monkeypatch.setattr(flashinfer_attention, "check_planned", lambda *_: None)
    device = Device(torch.device("cuda", 0), torch.bfloat16, HostMemory(), Computing(double.work))
    make = double.BatchPrefillWithPagedKVCacheWrapper

    def missing(*args: Any, backend: str, **kwargs: Any) -> Any:
        if backend == "fa3":
            raise RuntimeError("nvcc was not found")
        return make(*args, backend=backend, **kwargs)

    monkeypatch.setattr(double, "BatchPrefillWithPagedKVCacheWrapper", missing)
    assert KERNELS["flashinfer"](SIZES, device).name == "flashinfer"
    assert (
        "large chunks run on FlashInfer's fa2, because fa3 failed (RuntimeError: nvcc was not found)"
        in caplog.text
    )


@pytest.mark.long
@pytest.mark.usefixtures("_gpu")
def test_every_kernel_is_tried_out_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that is missing shows then; the double stands for it with a function that raises."""
    double = FlashInferDouble()
    monkeypatch.setattr(flashinfer_kernels, "import_module", lambda _: double)
    monkeypatch.setattr(
        flashinfer_attention, "check_planned", lambda *_: None
    )  # tensors that say "cuda" need one
    device = Device(torch.device("cuda", 0), torch.bfloat16, HostMemory(), Computing(double.work))
    kernels = KERNELS["flashinfer"](SIZES, device)
    assert (kernels.name, type(kernels.rows)) == ("flashinfer", FlashInferRows)
    assert {*CALLED} - double.called == {"BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer"}, (
        "for captures"
    )
    uneven = KERNELS["flashinfer"](replace(SIZES, intermediate_size=4097), device)
    assert (uneven.name, type(uneven.rows)) == ("flashinfer", TorchRows)

    def missing(*args: object, **kwargs: object) -> None:
        raise RuntimeError("nvcc was not found")

    for name in (
        "merge_state_in_place",
        "rmsnorm",
        "fused_add_rmsnorm",
        "silu_and_mul",
        "BatchDecodeWithPagedKVCacheWrapper",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(double, name, missing)
            with pytest.raises(KernelsUnavailable, match=r"tried out \(RuntimeError: nvcc was not found"):
                KERNELS["flashinfer"](SIZES, device)


def test_without_a_gpu_they_are_not_even_imported() -> None:
    with pytest.raises(KernelsUnavailable, match="torch sees no GPU"):
        KERNELS["flashinfer"](
            SIZES, Device(torch.device("cuda", 0), torch.bfloat16, HostMemory(), InOrder(HOST))
        )
    assert choose_kernels(SIZES, host_device(torch.bfloat16)).name == "torch"
    assert next(iter(KERNELS)) == "flashinfer"
