"""Run the adapter on the installed FlashInfer's own Python code, with a kernel in float64 in place of its compiled ones.

    python -m tests.worker.kernels.flashinfer_real

It needs no GPU and no compiler: what FlashInfer asks of CUDA is answered here. Its checks, its defaults, and the place of each
argument are its own, and so is what reaches the kernel. `test_extra_gpu.py` runs this with each version that we support.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from medha_worker.device import host_device
from medha_worker.kernels.flashinfer.flashinfer_attention import FlashInferAttention
from medha_worker.kernels.flashinfer.flashinfer_rows import FlashInferRows
from medha_worker.kernels.torch_rows import TorchRows

from .computing_device import on_device, on_host
from .flashinfer_cases import Case, Chunk, assert_equals_torch
from .flashinfer_defects import STEPS
from .flashinfer_double import FlashInferDouble, attend_pages

HND, CAUSAL, CUSTOM = 1, 1, 2
"""Values that FlashInfer's kernels know layouts and masks by."""


class Kernel:
    """Stands for a compiled attention module: it reads what FlashInfer's wrappers pass to it."""

    def __init__(self, backend: str) -> None:
        assert backend == "fa2", backend

    def plan(self, *given: Any) -> list[Any]:
        _, _, _, row_starts, page_starts, lengths, rows, batch, *_ = given
        assert rows == int(row_starts[-1]), (rows, row_starts)
        assert len(page_starts) == batch + 1 == len(lengths) + 1
        split_pages, never = given[16:18]
        return [lengths.tolist(), split_pages, never]

    def paged_run(self, *given: Any) -> None:
        plan, q, k, v, row_starts, page_starts, pages, last = given[2:10]
        out, sums, mask_mode, layout, window = given[10:15]
        mask, mask_starts, scale = given[16], given[17], given[23]
        assert layout == HND
        lengths, page_size = plan[0], k.shape[2]
        assert ((page_starts.diff() - 1) * page_size + last).tolist() == lengths
        assert mask is None or mask_starts[0] == 0
        seen = {
            "row_starts": row_starts.tolist(), "page_starts": page_starts.tolist(), "pages": pages, "lengths": lengths,
            "sm_scale": scale, "mask": mask if mask_mode == CUSTOM else None, "causal": mask_mode == CAUSAL,
            "window_left": window,
        }  # fmt: skip
        result, log_sums = attend_pages(q, k, v, seen)
        out.copy_(result)
        sums.copy_(log_sums)


def without_pinned_memory() -> None:
    """Let `torch.empty` make ordinary memory where pinned memory is asked for, which needs a driver."""
    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return empty(*args, **kwargs)

    torch.empty = unpinned  # type: ignore[assignment]


def installed() -> Any:
    """Return the package `flashinfer`, with its kernels and what it asks of CUDA replaced."""
    library = importlib.import_module("flashinfer")
    double = FlashInferDouble()
    without_pinned_memory()
    for name in ("prefill", "decode", "cascade", "norm", "rope", "activation"):
        module = importlib.import_module(f"flashinfer.{name}")
        answers: Mapping[str, Any] = {
            "device_support_pdl": lambda device: False,
            "get_batch_prefill_module": lambda backend, *_: Kernel(backend),
            "get_cascade_module": lambda: SimpleNamespace(merge_state_in_place=merged),
            "get_norm_module": lambda: SimpleNamespace(rmsnorm=normed, fused_add_rmsnorm=added),
            "get_act_and_mul_module": lambda _: SimpleNamespace(silu_and_mul=multiplied),
            "get_rope_module": lambda: SimpleNamespace(apply_rope_pos_ids_cos_sin_cache=turned),
            "_USE_CUDA_NORM": True,
        }
        for attribute, answer in answers.items():
            if hasattr(module, attribute):
                setattr(module, attribute, answer)

    def merged(v: Any, s: Any, v_other: Any, s_other: Any, mask: Any) -> None:
        assert mask is None
        double.merge_state_in_place(*(on_device(one) for one in (v, s, v_other, s_other)))

    def normed(out: Any, x: Any, weight: Any, eps: float, pdl: bool) -> None:
        double.rmsnorm(on_device(x), on_device(weight), eps, out=on_device(out))

    def added(x: Any, residual: Any, weight: Any, eps: float, pdl: bool) -> None:
        double.fused_add_rmsnorm(on_device(x), on_device(residual), on_device(weight), eps)

    def multiplied(out: Any, x: Any, pdl: bool) -> None:
        out.copy_(on_host(double.silu_and_mul(on_device(x))))

    def turned(q: Any, k: Any, q_out: Any, k_out: Any, table: Any, index: Any, interleaved: bool) -> None:
        assert q.data_ptr() == q_out.data_ptr()
        assert k.data_ptr() == k_out.data_ptr()
        double.apply_rope_with_cos_sin_cache_inplace(
            on_device(index),
            on_device(q.flatten(1)),
            on_device(k.flatten(1)),
            q.shape[-1],
            on_device(table),
            not interleaved,
        )

    return library


def main() -> None:
    library = installed()
    for case in STEPS:
        attention = FlashInferAttention(library, host_device(case.dtype), case.sizes)
        for _ in range(2):  # wrappers that had a mask, or none, are planned again
            q, keys, values, sinks = case.tensors()
            step = attention.plan(case.spans(), case.block_tokens, case.window_tokens)
            assert_equals_torch(case, step.attend(q, keys, values, sinks))
            del step
        print("as plain torch:", case)
    case = Case([Chunk(1, 9), Chunk(1, 0), Chunk(1, 14)])
    graph = FlashInferAttention(library, host_device(case.dtype), case.sizes).for_graph(3, 16)
    assert graph is not None
    for contexts in ((9, 0, 14), (1, 3, 0)):
        case = replace(case, chunks=[Chunk(1, context) for context in contexts])
        graph.replan(case.spans(), case.block_tokens)
        q, keys, values, _ = case.tensors()
        assert_equals_torch(case, graph.attend(q, keys, values))
    print("as plain torch: captured decodes")

    rows, plain = FlashInferRows(library, TorchRows()), TorchRows()
    heads, weight, wide, angles = (
        torch.randn(shape).half() for shape in ((5, 4, 64), (64,), (5, 200), (5, 32))
    )
    close = {"rtol": 1e-2, "atol": 1e-2}
    for x in (heads, heads[:, 1]):
        torch.testing.assert_close(rows.rms_norm(x, weight, 1e-5), plain.rms_norm(x, weight, 1e-5), **close)
    hidden, part = heads[:, 1].clone(), heads[:, 2].clone()
    normed = rows.add_rms_norm(hidden, part, weight, 1e-5)
    torch.testing.assert_close(hidden, heads[:, 1] + heads[:, 2], **close)
    torch.testing.assert_close(normed, plain.rms_norm(hidden, weight, 1e-5), **close)
    multiplied = rows.silu_multiply(wide[:, :192])
    torch.testing.assert_close(multiplied, plain.silu_multiply(wide.clone()[:, :192]), **close)
    wanted = heads.clone()
    rows.rotate(heads[:, :3], angles.cos(), angles.sin())
    plain.rotate(wanted[:, :3], angles.cos(), angles.sin())
    torch.testing.assert_close(heads, wanted, **close)
    print("as plain torch: rows")


if __name__ == "__main__":
    main()
