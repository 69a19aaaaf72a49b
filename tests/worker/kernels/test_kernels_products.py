"""Compiled matrix products: right for any sizes and layouts, and the same to the bit beside any other rows."""

from __future__ import annotations

import pytest
import torch

from medha_worker.kernels.cpu.compiled_products import CompiledProducts
from medha_worker.kernels.cpu.helper_team import HelperTeam
from medha_worker.kernels.cpu.host_compiler import Target
from medha_worker.kernels.cpu.huge_pages import HugePages
from medha_worker.kernels.cpu.product_code import CHUNK_ROWS
from medha_worker.kernels.packed_weight import PackedWeight
from medha_worker.kernels.torch_products import TorchProducts

TARGETS = {"avx512": Target(16, 4, 6), "avx2": Target(8, 2, 6), "others": Target(4, 4, 4)}
ROWS = (1, 2, 6, 7, 32, CHUNK_ROWS + 3)
PACKED_ROWS = (0, 1, 2, 3, 7, 13, 25, CHUNK_ROWS + 3)
# Inner and columns: whole blocks and panels, and parts of them.
SIZES = ((512, 768), (1408, 128), (131, 100), (5, 17), (1, 1))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[1, 2], autouse=True)
def _threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def ours() -> CompiledProducts:
    return CompiledProducts(HelperTeam())


def is_close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """True if float32 results are as near to float64 ones as rounding allows."""
    return torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_products_are_right_for_whole_and_partial_blocks_in_both_layouts(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "of_host", classmethod(lambda _: target))
    ours = CompiledProducts(HelperTeam())
    for inner, columns in SIZES:
        x, bias = normal(max(ROWS), inner), normal(columns, seed=1)
        stored = normal(inner, columns, seed=2)
        wanted = x.double() @ stored.double()
        for weight in (stored, stored.t().contiguous().t()):
            for rows in ROWS:
                case = f"{rows} rows, {inner} x {columns}, strides {weight.stride()}"
                assert is_close(ours.product(x[:rows], weight), wanted[:rows]), case
                assert is_close(ours.product(x[:rows], weight, bias), (wanted + bias)[:rows]), case


def test_results_are_put_or_added_where_they_belong_and_nowhere_else(ours: CompiledProducts) -> None:
    x, weight = normal(9, 140)[:, 7:], normal(133, 70, seed=1)
    wanted = x.double() @ weight.double()
    around = normal(11, 80, seed=2)
    for adds in (False, True):
        memory = around.clone()
        target = memory[1:10, 5:75]
        if adds:
            ours.add_product(target, x, weight)
        else:
            assert ours.product(x, weight, out=target) is target
        assert is_close(target, wanted + around[1:10, 5:75] if adds else wanted)
        target.copy_(around[1:10, 5:75])
        assert torch.equal(memory, around)


@pytest.mark.parametrize(
    "columns", [256, 200, 197, 5008]
)  # whole panels, whole vectors, neither, several pieces
def test_a_row_gets_the_same_bits_alone_and_among_others_in_every_layout(
    ours: CompiledProducts, columns: int
) -> None:
    x, weight = normal(400, 600), normal(600, columns, seed=1)
    everything = ours.product(x, weight)
    for part in (slice(0, 1), slice(5, 7), slice(3, 36), slice(190, 399)):
        for same in (weight, weight.t().contiguous().t()):
            assert torch.equal(ours.product(x[part], same), everything[part])


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_a_packed_weight_gives_the_same_bits_for_any_rows_and_targets(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "of_host", classmethod(lambda _: target))
    ours = CompiledProducts(HelperTeam())
    x, added = normal(max(PACKED_ROWS), 300), normal(max(PACKED_ROWS), 448, seed=2)
    for columns in (64, 448):
        weight, bias = normal(300, columns, seed=1), normal(columns, seed=3)
        packed = ours.pack(weight)
        assert isinstance(packed, PackedWeight)
        assert packed.shape == weight.shape
        assert torch.equal(packed.numbers(), weight)
        for rows in PACKED_ROWS:
            some = x[:rows]
            assert torch.equal(ours.product(some, packed), ours.product(some, weight))
            assert torch.equal(ours.product(some, packed, bias), ours.product(some, weight, bias))
            totals = [added[:rows, :columns].clone() for _ in range(2)]
            for total, form in zip(totals, (weight, packed), strict=True):
                ours.add_product(total, some, form)
            assert torch.equal(*totals)


def test_torch_multiplies_by_a_packed_weight_as_by_its_numbers(ours: CompiledProducts) -> None:
    x, weight = normal(3, 96), normal(96, 128, seed=1)
    packed, torchs = ours.pack(weight), TorchProducts()
    assert torch.equal(torchs.product(x, packed), torchs.product(x, weight))
    totals = torch.zeros(2, 3, 128)
    for total, form in zip(totals, (weight, packed), strict=True):
        torchs.add_product(total, x, form)
    assert torch.equal(*totals)


def test_weights_that_are_empty_do_not_fill_panels_or_share_memory_with_an_embedding_are_not_packed(
    ours: CompiledProducts,
) -> None:
    for weight in (normal(64, 100), normal(128, 64).t(), normal(2, 64, 128), normal(64, 0)):
        assert ours.pack(weight) is weight


def test_packed_weights_lie_one_behind_the_other_and_outlive_what_packed_them() -> None:
    pages = HugePages()
    first, second, wide = pages.take(3, 5), pages.take(1024), pages.take(17 << 20)
    assert second.data_ptr() - first.data_ptr() == 4096
    assert not any(part.any() for part in (first, second, wide[:: 1 << 20]))
    first.fill_(1.0)
    second.fill_(2.0)
    del pages
    assert first.unique().tolist() == [1.0]
    assert second.unique().tolist() == [2.0]


def test_no_rows_and_no_columns_are_no_work(ours: CompiledProducts) -> None:
    assert ours.product(normal(0, 64), normal(64, 32)).shape == (0, 32)
    assert ours.product(normal(3, 64), normal(64, 0)).shape == (3, 0)


def test_layouts_that_the_code_cannot_read_are_refused(ours: CompiledProducts) -> None:
    with pytest.raises(AssertionError):
        ours.product(normal(3, 64), normal(64, 64)[:, ::2])
    with pytest.raises(AssertionError):
        ours.product(normal(64, 3).t(), normal(64, 64))
