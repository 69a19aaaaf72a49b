"""The batch-invariant kernels in Triton: exact and invariant in Triton's interpreter, and compiled for three generations of GPUs.

Each runs in a process of its own: Triton reads whether to interpret when it is imported.
"""

from __future__ import annotations

from itertools import product

import pytest

from .test_triton_race import printed

# NumPy's products round a row by its place among others. So the interpreter's are replaced by sums in one order.
INTERPRETED = """
import numpy as np
import torch
from triton.runtime import interpreter

def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    left, right = (x.data.astype(np.float32) for x in (a, b))
    return interpreter.TensorHandle(np.einsum("ik,kj->ij", left, right) + d.data, d.dtype.scalar)

interpreter.InterpreterBuilder.create_dot = create_dot

from medha_worker.device import host_device
from medha_worker.kernels.protocol import KernelSizes
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.kernels.torch_attention import TorchAttention
from medha_worker.kernels.torch_products import TorchProducts
from medha_worker.kernels.torch_rows import TorchRows
from medha_worker.kernels.triton import triton_attention, triton_products, triton_rows

def near(found, wanted, dtype=torch.float32):
    tolerance = {torch.float32: 2e-5, torch.float16: 5e-3}[dtype]
    torch.testing.assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance)
"""

ATTENTION = """
triton_attention.TILE_ROWS = 16
triton_attention._PARTIAL_BYTES = 40_000  # several launches
sizes = KernelSizes(query_heads=6, kv_heads=2, head_dim=24, hidden_size=0, intermediate_size=0)
for dtype in (torch.float32, torch.float16):
    torch.manual_seed(0)
    device = host_device(dtype)
    ours = triton_attention.TritonAttention(device, sizes, split_keys=64)
    plain = TorchAttention(host_device(torch.float32))
    tables = [torch.randperm(40).tolist() for _ in range(3)]
    keys, values = (torch.randn(2, 41 * 8, 24).to(dtype) for _ in range(2))
    keys[:, 40 * 8 :] = values[:, 40 * 8 :] = torch.nan  # a block of somebody else
    rows = torch.randn(40, 9, 24).to(dtype)
    q = rows[:, :6]  # a view, as among keys and values
    chunk = SequenceSpan(0, 12, 130, tables[0])
    spans = [chunk, SequenceSpan(12, 1, 200, tables[1]), SequenceSpan(13, 1, 0, tables[2]),
             SequenceSpan(14, 7, 20, tables[1], stride=2), SequenceSpan(21, 9, 70, tables[2], is_causal=False),
             SequenceSpan(30, 10, 0, tables[2])]
    sinks = torch.randn(6)
    own = [SequenceSpan(0, 12, 130, tables[0], first_key=100, first_stride=1),
           SequenceSpan(12, 9, 70, tables[1], is_causal=False, first_key=-3, first_stride=2),
           SequenceSpan(21, 1, 200, [40] * 18 + tables[1][18:], is_causal=False, first_key=150),
           SequenceSpan(22, 7, 20, tables[2], stride=2, first_key=9)]
    for window, sink, which in ((None, None, spans), (None, sinks, spans), (70, None, spans[:3] + spans[5:]), (None, None, own)):
        if window:
            which = [*which[:3], SequenceSpan(14, 10, 0, tables[2])]
        count = which[-1].rows.stop
        output, sums = ours.plan(which, 8, window).attend(q[:count], keys, values, sink)
        wanted, wanted_sums = plain.plan(which, 8, window).attend(q[:count].float(), keys.float(), values.float(), sink)
        near(output, wanted, dtype)
        near(sums, wanted_sums, dtype)

    def attended(spans, rows):
        return torch.cat([part.flatten(1) for part in ours.plan(spans, 8).attend(rows, keys, values)], dim=1)

    whole = attended([chunk], q[:12])
    decodes = [SequenceSpan(row, 1, 130 + row, tables[0]) for row in range(12)]
    assert torch.equal(attended(decodes, q[:12]), whole), "decodes"
    for first, last in ((0, 5), (5, 12), (3, 4)):
        part = SequenceSpan(0, last - first, 130 + first, tables[0])
        assert torch.equal(attended([part], q[first:last]), whole[first:last]), "chunks"
    assert torch.equal(attended(spans, q)[:12], whole), "beside others"
print("exact and invariant")
"""

PRODUCTS = """
ours, plain = triton_products.TritonProducts(), TorchProducts()
for dtype in (torch.float32, torch.float16):
    torch.manual_seed(0)
    for inner, columns in ((70, 65), (128, 10)):
        x, bias = torch.randn(66, inner + 3).to(dtype)[:, :inner], torch.randn(columns).to(dtype)
        for weight in (torch.randn(inner, columns).to(dtype) / 8, (torch.randn(columns, inner).to(dtype) / 8).t()):
            whole = ours.product(x, weight)
            near(whole, plain.product(x.float(), weight.float()), dtype)
            for part in (slice(0, 1), slice(65, 66), slice(3, 20), slice(1, 66)):
                assert torch.equal(ours.product(x[part], weight), whole[part]), part
            out = torch.empty(66, columns, dtype=dtype)
            assert ours.product(x, weight, bias, out) is out
            near(out, plain.product(x.float(), weight.float(), bias.float()), dtype)
            ours.add_product(out, x, weight)
            near(out, 2 * whole.float() + bias.float(), dtype)
    assert ours.product(x[:0], weight).shape == (0, columns)
print("exact and invariant")
"""

EXPERTS = """
ours, each = triton_products.TritonExpertProducts(), triton_products.TritonProducts()
triton_products.TILES.update(tile_rows=16, tile_columns=16)
for dtype in (torch.float32, torch.float16):
    torch.manual_seed(0)
    weights = torch.randn(5, 20, 35).to(dtype) / 8
    for ends in ([0, 33, 33, 40, 41], [0, 0, 0, 0, 3], [1, 2, 3, 4, 5]):
        x, row_ends = torch.randn(ends[-1], 23).to(dtype)[:, :20], torch.tensor(ends, dtype=torch.int32)
        for some in (weights, weights.transpose(1, 2).contiguous().transpose(1, 2)):
            found, first = ours.product(x, some, row_ends), 0
            for expert, end in enumerate(ends):
                assert torch.equal(found[first:end], each.product(x[first:end], weights[expert])), (ends, expert)
                first = end
    assert ours.product(x[:0], weights, row_ends * 0).shape == (0, 35)
print("exact and invariant")
"""

NORMS = """
ours, plain = triton_rows.TritonRows(TorchRows()), TorchRows()
for dtype in (torch.float32, torch.float16):
    torch.manual_seed(0)
    wide = torch.randn(9, 7, 100).to(dtype)
    for x in (wide[:, 2], wide[:, 2:6, :48]):  # rows, and heads, among others
        shape, weight = x.shape, torch.randn(x.shape[-1]).to(dtype)
        whole = ours.rms_norm(x, weight, 1e-5)
        assert whole.shape == shape
        near(whole, plain.rms_norm(x, weight, 1e-5), dtype)
        for part in (slice(0, 1), slice(8, 9), slice(2, 7)):
            assert torch.equal(ours.rms_norm(x[part], weight, 1e-5), whole[part]), part
print("exact and invariant")
"""

CASES = {"attention": ATTENTION, "products": PRODUCTS, "experts": EXPERTS, "norms": NORMS}


@pytest.mark.parametrize(
    "case",
    ["norms", *(pytest.param(one, marks=pytest.mark.long) for one in ("attention", "products", "experts"))],
)
def test_interpreted_kernels_are_exact_and_rows_do_not_depend_on_others(case: str) -> None:
    assert printed(INTERPRETED + CASES[case], TRITON_INTERPRET="1") == "exact and invariant\n"


PLAN = """
plan = triton_attention.TritonAttention.plan
def by_step(self, spans, *rest):
    self.split_keys = {choice}
    return plan(self, spans, *rest)
triton_attention.TritonAttention.plan = by_step
"""
PRODUCT = """
product = triton_products.TritonProducts.product
def by_rows(self, x, *rest):
    triton_products.TILES["tile_inner"] = 16 if len(x) < 8 else 64
    return product(self, x, *rest)
triton_products.TritonProducts.product = by_rows
"""
EXPERT = """
row_blocks = triton_products.row_blocks
def in_another_order(*sizes):
    found = row_blocks(*sizes)
    found.expert.copy_(found.expert.roll(1))
    return found
triton_products.row_blocks = in_another_order
"""
NORM = """
rms_norm = triton_rows.TritonRows.rms_norm
def by_rows(self, x, weight, eps):
    return rms_norm(self, x, weight, eps) if len(x) < 8 else TorchRows().rms_norm(x, weight, eps)
triton_rows.TritonRows.rms_norm = by_rows
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "planted", "found"),
    [
        ("attention", PLAN.format(choice="128 if len(spans) == 6 else 64"), "beside others"),
        ("attention", PLAN.format(choice="1024 if spans[0].row_count == 1 else 64"), "decodes"),
        ("attention", PLAN.format(choice="64 if spans[0].row_count > 5 else 128"), "decodes|chunks"),
        ("products", PRODUCT, "AssertionError: slice"),
        ("experts", EXPERT, "AssertionError: "),
        ("norms", NORM, "AssertionError: slice"),
    ],
)
def test_kernels_that_look_at_the_step_are_found(case: str, planted: str, found: str) -> None:
    with pytest.raises(AssertionError, match=found):
        printed(INTERPRETED + planted + CASES[case], TRITON_INTERPRET="1")


COMPILED = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from medha_worker.kernels.triton import triton_attention as attention, triton_products as products, triton_rows as rows

capability, kind = int(sys.argv[1]), sys.argv[2]

def compiled(kernel, types, **constants):
    names = kernel.arg_names
    signature = dict(zip(names, types.split())) | dict.fromkeys(constants, "constexpr")
    assert list(signature) == names, (list(signature), names)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert f".target sm_{capability}" in made.asm["ptx"]
    assert len(made.asm["cubin"]) > 1000
    # Shared memory of one block: sm_80 has the least of the three.
    assert made.metadata.shared <= 163 * 1024, made.metadata.shared

value = "*" + kind
compiled(products.product_kernel, f"{value} {value} {value} i32 i32 i32 i32 i32 i32 i32", **products.TILES)
compiled(products.expert_product_kernel, f"{value} {value} {value} *i64 *i64 *i64 i32 i32 i32 i32 i32 i32 i32", **products.TILES)
compiled(rows.norm_kernel, f"{value} {value} {value} i32 i32 i32 fp32", tile=4096)
for head_dim in (64, 128, 256):
    compiled(attention.split_kernel, f"{value} {value} {value} *i32 *i64 *fp32 *fp32 fp32 i32 i32 i32 i32 i32",
             head_dim=head_dim, dim_tile=head_dim, tile_rows=attention.TILE_ROWS, tile_keys=attention.TILE_KEY_BYTES // (4 if kind == "fp32" else 2),
             split_keys=attention.SPLIT_KEYS)
    compiled(attention.merge_kernel, f"*fp32 *fp32 *i64 {value} *fp32 i32", head_dim=head_dim, dim_tile=head_dim)
print("compiled")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("capability", "kind"),
    list(product((80, 90, 100), ("bf16", "fp16", "fp32"))),
)
def test_kernels_compile_for_each_generation_of_gpus(capability: int, kind: str) -> None:
    assert printed(COMPILED, str(capability), kind) == "compiled\n"
