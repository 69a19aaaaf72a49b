"""The MLP of sparse layers is that of `transformers`, for any sizes and any choice of experts, and no row depends on another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from medha_worker.device import Device, host_device
from medha_worker.kernels.cpu.compiled_kernels import compiled_kernels
from medha_worker.kernels.expert_products import (
    BlockedProducts,
    GroupedProducts,
    ProductPerExpert,
    expert_products,
)
from medha_worker.kernels.name_table import torch_kernels
from medha_worker.kernels.protocol import Kernels, KernelSizes
from medha_worker.kernels.row_blocks import row_blocks
from medha_worker.kernels.torch_products import TorchProducts
from medha_worker.model.experts_mlp import choose
from medha_worker.model.experts_mlp import experts_mlp as mlp_of_choice
from medha_worker.model.model_config import ClampedSwiglu, ExpertsConfig
from medha_worker.model.quantised_weights import LinearProducts
from medha_worker.model.tensor_group import Alone
from medha_worker.model.weights import LayerWeights

HIDDEN = 32
DEVICE = host_device(torch.float32)
PLAIN = torch_kernels(DEVICE)
GROUPED = replace(PLAIN, name="grouped", experts=GroupedProducts(PLAIN.experts))
COMPILED = compiled_kernels(KernelSizes(4, 2, 32, HIDDEN, 16, 16), DEVICE, PLAIN)


def block_of(experts: ExpertsConfig, seed: int = 0) -> Qwen3MoeSparseMoeBlock:
    config = transformers.Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=experts.intermediate_size,
        num_experts=experts.count,
        num_experts_per_tok=experts.per_token,
        norm_topk_prob=experts.renormalises,
        experts_implementation="eager",
    )
    block = Qwen3MoeSparseMoeBlock(config)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.3)
    return block


def weights_of(block: Qwen3MoeSparseMoeBlock) -> LayerWeights:
    none = torch.empty(0)
    return LayerWeights(
        input_norm=none,
        qkv=none,
        qkv_bias=None,
        q_norm=None,
        k_norm=None,
        output=none,
        output_bias=None,
        post_norm=none,
        gate_up=block.experts.gate_up_proj.detach().transpose(1, 2).contiguous(),
        gate_up_bias=None,
        down=block.experts.down_proj.detach().transpose(1, 2).contiguous(),
        down_bias=None,
        router=block.gate.weight.detach().t().contiguous(),
    )


def experts_mlp(
    kernels: Kernels, experts: ExpertsConfig, layer: LayerWeights, normed: torch.Tensor
) -> torch.Tensor:
    products = LinearProducts(kernels.products, Alone(), 0, 1)
    return mlp_of_choice(kernels, products, experts, layer, normed, choose(kernels, experts, layer, normed))


def rows_of(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


@given(
    sizes=st.integers(1, 12).flatmap(lambda count: st.tuples(st.just(count), st.integers(1, count))),
    width=st.sampled_from([1, 7, 16, 48]),
    rows=st.integers(1, 60),
    renormalises=st.booleans(),
    seed=st.integers(0, 100),
    kernels=st.sampled_from([PLAIN, COMPILED, GROUPED]),
)
@settings(max_examples=60)
@torch.inference_mode()
def test_any_sizes_give_what_transformers_gives(
    sizes: tuple[int, int], width: int, rows: int, renormalises: bool, seed: int, kernels: Kernels
) -> None:
    """Few rows leave experts without any; there may be one expert, and each row may pass all of them."""
    if kernels is COMPILED and width % 16:
        kernels = replace(COMPILED, rows=PLAIN.rows)  # as it is chosen for widths that do not fill registers
    experts = ExpertsConfig(*sizes, width, renormalises, frozenset({0}))
    block = block_of(experts, seed)
    x = rows_of(rows, seed + 1)
    found = experts_mlp(kernels, experts, weights_of(block), x)
    torch.testing.assert_close(found, block(x[None])[0], rtol=1e-4, atol=1e-5)


@given(
    sizes=st.integers(1, 8).flatmap(lambda count: st.tuples(st.just(count), st.integers(1, count))),
    width=st.sampled_from([1, 7, 16, 48]),
    rows=st.integers(1, 60),
    limit=st.sampled_from([0.5, 3.0, 7.0]),
    seed=st.integers(0, 100),
    kernels=st.sampled_from([PLAIN, COMPILED, GROUPED]),
)
@settings(max_examples=30)
@torch.inference_mode()
def test_biases_and_clamped_gates_give_what_gpt_oss_gives(
    sizes: tuple[int, int], width: int, rows: int, limit: float, seed: int, kernels: Kernels
) -> None:
    """With rows of large numbers, gates and ups are on both sides of the limit."""
    if kernels is COMPILED and width % 16:
        kernels = replace(COMPILED, rows=PLAIN.rows)
    swiglu = ClampedSwiglu(1.702, limit)
    experts = ExpertsConfig(*sizes, width, renormalises=True, layers=frozenset({0}), swiglu=swiglu)
    config = transformers.GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=width, num_local_experts=sizes[0], num_experts_per_tok=sizes[1],
        swiglu_limit=limit, experts_implementation="eager",
    )  # fmt: skip
    block, random = GptOssMLP(config), torch.Generator().manual_seed(seed)
    for parameter in block.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.3)
    x = rows_of(rows, seed + 1) * 3
    apart = [*range(0, 2 * width, 2), *range(1, 2 * width, 2)]
    weights = replace(
        weights_of(block_of(ExpertsConfig(1, 1, 1, False, frozenset()))),
        gate_up=block.experts.gate_up_proj[..., apart].contiguous(),
        gate_up_bias=block.experts.gate_up_proj_bias[:, apart].contiguous(),
        down=block.experts.down_proj.data,
        down_bias=block.experts.down_proj_bias.data,
        router=block.router.weight.t().contiguous(),
        router_bias=block.router.bias.data,
    )
    found = experts_mlp(kernels, experts, weights, x)
    torch.testing.assert_close(found, block(x[None])[0][0], rtol=1e-4, atol=1e-4)
    if kernels is COMPILED:
        assert torch.equal(experts_mlp(kernels, experts, weights, x[:1]), found[:1])


@torch.inference_mode()
def test_no_row_is_dropped_where_all_choose_the_same_experts() -> None:
    experts = ExpertsConfig(8, 2, 16, renormalises=True, layers=frozenset({0}))
    block = block_of(experts)
    x = rows_of(1).expand(200, HIDDEN).contiguous()
    found = experts_mlp(PLAIN, experts, weights_of(block), x)
    torch.testing.assert_close(found, block(x[None])[0], rtol=1e-4, atol=1e-5)
    assert float(found.abs().max()) > 0.01


@pytest.mark.parametrize("kernels", [PLAIN, COMPILED, GROUPED], ids=lambda kernels: kernels.name)
@torch.inference_mode()
def test_rows_of_nan_stay_rows_of_nan(kernels: Kernels) -> None:
    """So a sequence ends for which memory ran out, and the others of its step go on."""
    experts = ExpertsConfig(5, 2, 16, renormalises=True, layers=frozenset({0}))
    weights, x = weights_of(block_of(experts)), rows_of(20)
    wanted = experts_mlp(kernels, experts, weights, x)
    broken = x.clone()
    broken[[3, 11]] = torch.nan
    found = experts_mlp(kernels, experts, weights, broken)
    others = [row for row in range(20) if row not in (3, 11)]
    assert bool(found[[3, 11]].isnan().all())
    torch.testing.assert_close(found[others], wanted[others], rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_compiled_products_give_a_row_the_same_bits_beside_any_others() -> None:
    """`spec.determinism: batchInvariant` rests on it."""
    experts = ExpertsConfig(6, 3, 16, renormalises=False, layers=frozenset({0}))
    weights, x = weights_of(block_of(experts)), rows_of(70)
    together = experts_mlp(COMPILED, experts, weights, x)
    for part in (slice(0, 1), slice(5, 6), slice(3, 36), slice(2, 66)):
        assert torch.equal(experts_mlp(COMPILED, experts, weights, x[part]), together[part])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_product_is_a_product_for_each_expert(dtype: torch.dtype) -> None:
    x = rows_of(40).to(dtype)
    weights = torch.randn(5, HIDDEN, 24, generator=torch.Generator().manual_seed(2)).to(dtype)
    each, row_ends = ProductPerExpert(TorchProducts()), torch.tensor([7, 7, 8, 40, 40], dtype=torch.int32)
    wanted = torch.cat([x[:7] @ weights[0], x[7:8] @ weights[2], x[8:] @ weights[3]])
    for products in (each, GroupedProducts(each)):
        torch.testing.assert_close(products.product(x, weights, row_ends), wanted, rtol=2e-2, atol=2e-2)


@settings(max_examples=60)
@given(
    counts=st.lists(st.integers(0, 40) | st.just(0), min_size=1, max_size=9),
    columns=st.integers(1, 40),
    is_transposed=st.booleans(),
)
def test_products_of_blocks_are_those_of_each_expert(
    counts: list[int], columns: int, is_transposed: bool
) -> None:
    x, random = rows_of(sum(counts)), torch.Generator().manual_seed(2)
    weights = torch.randn(len(counts), HIDDEN, columns, generator=random)
    if is_transposed:
        weights = weights.transpose(1, 2).contiguous().transpose(1, 2)
    row_ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    wanted = ProductPerExpert(TorchProducts()).product(x, weights, row_ends)
    torch.testing.assert_close(BlockedProducts().product(x, weights, row_ends), wanted, rtol=1e-4, atol=1e-4)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.sampled_from([1, 2, 64, 128]))
def test_every_row_is_in_one_block_of_its_expert(counts: list[int], size: int) -> None:
    row_ends, rows = torch.tensor(counts).cumsum(0).to(torch.int32), sum(counts)
    blocks = row_blocks(row_ends, rows, size)
    found = [
        (expert, row)
        for expert, first, end in zip(
            blocks.expert.tolist(), blocks.first.tolist(), blocks.end.tolist(), strict=True
        )
        for row in range(first, min(first + size, end))
    ]
    own = [expert for expert, count in enumerate(counts) for _ in range(count)]
    assert found == list(zip(own, range(rows), strict=True))
    places = (blocks.first[:, None] + torch.arange(size)).flatten()[blocks.place]
    assert places.tolist() == list(range(rows))


def test_widths_that_the_grouped_product_does_not_take_go_to_the_others() -> None:
    class Recorded(ProductPerExpert):
        calls = 0

        def product(self, x: torch.Tensor, weights: torch.Tensor, row_ends: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().product(x, weights, row_ends)

    each = Recorded(TorchProducts())
    grouped, row_ends = GroupedProducts(each), torch.tensor([2, 4], dtype=torch.int32)
    narrow = torch.ones(2, HIDDEN, 3)
    assert grouped.product(torch.ones(4, HIDDEN), narrow, row_ends).tolist() == [[HIDDEN] * 3] * 4
    grouped.product(torch.ones(4, HIDDEN), torch.ones(2, HIDDEN, 8), row_ends)
    assert each.calls == 1


@pytest.mark.parametrize(("waits", "kind"), [(True, BlockedProducts), (False, GroupedProducts)])
def test_a_gpu_whose_grouped_product_waits_for_the_host_multiplies_blocks_of_rows(
    monkeypatch: pytest.MonkeyPatch, waits: bool, kind: type
) -> None:
    """A100 and L4 have no kernel for it, so that a capture of decodes would fail at the start of a replica."""
    mode: list[int | str] = [0]

    def grouped(x: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        if waits and mode[0] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return x

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode[0])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda wanted: mode.__setitem__(0, wanted))
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", grouped)
    gpu = Device(torch.device("cuda"), torch.bfloat16, DEVICE.memory, DEVICE.runtime)
    assert type(expert_products(TorchProducts(), gpu)) is kind
    assert mode == [0]
