"""A double of FlashInfer's documented functions that the adapter uses, in float64 on the CPU.

It reads what they document, and nothing else. It raises where they demand something, and also where they accept a mistake in
silence and would compute something else: then the text says what they would do. The page tables, and the layouts, masks and
alignments that they stand for, are followed as they document them, not as the adapter makes them.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .computing_device import OnDevice, Work, on_device, on_host

LN_2 = math.log(2)
KV_TYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


class Refused(Exception):
    """The real functions would raise, or compute something else than was meant."""


def demand(condition: bool, otherwise: str) -> None:
    if not condition:
        raise Refused(otherwise)


def _is_on_device(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, OnDevice)


def _check_table(name: str, tensor: torch.Tensor, *, on_host: bool) -> None:
    demand(tensor.dtype == torch.int32, f"{name} is {tensor.dtype}, and its bits would be read as int32")
    demand(tensor.dim() == 1, f"{name} has {tensor.dim()} dimensions")
    if on_host:
        demand(not _is_on_device(tensor), f"{name} would be copied to the host, which waits for the device")
    else:
        demand(
            _is_on_device(tensor), f"{name} is in host memory: copying it waits, or a kernel cannot read it"
        )


def attend_pages(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention by page tables in float64, and its log-sum-exp of base 2.

    Args:
        q: [rows, query_heads, head_dim].
        k: [pages, kv_heads, page_size, head_dim].
        v: Likewise.
        plan: Where each sequence's rows and pages start, `row_starts` and `page_starts`; its `pages`; the keys that it
            has, `lengths`; the factor on scores, `sm_scale`; and what `_seen` reads.
    """
    group = q.shape[1] // k.shape[1]
    result = torch.zeros(q.shape, dtype=torch.float64)
    sums = torch.zeros(q.shape[:2], dtype=torch.float64)
    for sequence, length in enumerate(plan["lengths"]):
        rows = slice(*plan["row_starts"][sequence : sequence + 2])
        pages = plan["pages"][slice(*plan["page_starts"][sequence : sequence + 2])].long()
        demand(
            bool((pages < len(k)).all()),
            f"page {int(pages.max())} of {len(k)}: it would be read out of bounds",
        )
        seen_k, seen_v = (one[pages].transpose(0, 1).flatten(1, 2)[:, :length].double() for one in (k, v))
        seen_k, seen_v = (one.repeat_interleave(group, 0) for one in (seen_k, seen_v))
        scores = q[rows].double().transpose(0, 1) @ seen_k.transpose(1, 2) * plan["sm_scale"]
        scores = scores.masked_fill(~_seen(plan, rows.stop - rows.start, length), -math.inf)
        demand(
            bool((scores.logsumexp(-1) > -math.inf).all()), "a row sees no key: its result is undocumented"
        )
        result[rows] = (scores.softmax(-1) @ seen_v).transpose(0, 1)
        sums[rows] = scores.logsumexp(-1).transpose(0, 1) / LN_2
    return result, sums


def _seen(plan: Mapping[str, Any], rows: int, length: int) -> torch.Tensor:
    """Return which keys each row sees, bool [rows, keys]: causal masks and windows are aligned to the bottom right."""
    key, last = torch.arange(length)[None], length - rows + torch.arange(rows)[:, None]
    seen = torch.ones(rows, length, dtype=torch.bool)
    if plan["mask"] is not None:
        bits = on_host(plan["mask"])[:, None] >> torch.arange(8) & 1
        demand(bits.numel() >= rows * length, "the mask has too few bits")
        seen = bits.flatten()[: rows * length].view(rows, length).bool()
    elif plan["causal"]:
        seen = key <= last
    if plan["window_left"] >= 0:
        seen = seen & (key >= last - plan["window_left"])
    return seen


class FlashInferDouble:
    """Stands for the module `flashinfer`."""

    __version__ = "double"

    def __init__(
        self, work: Work | None = None, signatures: Mapping[str, inspect.Signature] | None = None
    ) -> None:
        """`signatures` are those of a real version, to which every call is bound."""
        self.work = work or Work()
        self._signatures = signatures or {}
        self.called: set[str] = set()
        self.wrappers: list[Any] = []
        self.BatchPrefillWithPagedKVCacheWrapper = self._maker(
            "BatchPrefillWithPagedKVCacheWrapper", PrefillDouble
        )
        self.BatchDecodeWithPagedKVCacheWrapper = self._maker(
            "BatchDecodeWithPagedKVCacheWrapper", DecodeDouble
        )

    def _maker(self, name: str, double: type[_Wrapper]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> _Wrapper:
            self.bind(f"{name}.__init__", None, *args, **kwargs)
            wrapper = double(self, name)
            wrapper.start(*args, **kwargs)
            self.wrappers.append(wrapper)
            return wrapper

        return make

    def bind(self, function: str, *args: Any, **kwargs: Any) -> None:
        """Raise TypeError if the real function could not be called like this."""
        self.called.add(function)
        if self._signatures:
            self._signatures[function].bind(*args, **kwargs)

    def merge_state_in_place(
        self, v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor
    ) -> None:
        """Merge two results whose log-sum-exps have base 2 into the first."""
        self.bind("merge_state_in_place", v, s, v_other, s_other)
        for name, tensor in (("v", v), ("s", s), ("v_other", v_other), ("s_other", s_other)):
            demand(_is_on_device(tensor), f"{name} is in host memory")
            demand(tensor.is_contiguous(), f"{name} has to be contiguous")
        demand(v.shape == v_other.shape and s.shape == s_other.shape, "the results have different shapes")
        demand(s.dtype == torch.float32 == s_other.dtype, "log-sum-exps are copied, and the copy is merged")
        ours, theirs = (on_host(one).double() for one in (s, s_other))
        union = torch.logaddexp2(ours, theirs)
        merged = on_host(v).double() * (ours - union).exp2()[..., None]
        merged += on_host(v_other).double() * (theirs - union).exp2()[..., None]
        on_host(v).copy_(merged)
        on_host(s).copy_(union)

    def rmsnorm(
        self,
        input: torch.Tensor,  # noqa: A002 - the real one's name
        weight: torch.Tensor,
        eps: float = 1e-6,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.bind("rmsnorm", input, weight, eps, out=out)
        demand(input.dim() in (2, 3), "rows or heads are normed")
        demand(input.dtype in (torch.float16, torch.bfloat16) and weight.dtype == input.dtype, "dtypes")
        demand(input.stride(-1) == 1, "the last dimension has to be contiguous")
        x = on_host(input).double()
        normed = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * on_host(weight).double()
        result = on_device(normed.to(input.dtype))
        if out is None:
            return result
        demand(out.shape == input.shape and out.dtype == input.dtype, "out is of another shape or dtype")
        on_host(out).copy_(on_host(result))
        return out

    def fused_add_rmsnorm(
        self,
        input: torch.Tensor,  # noqa: A002 - likewise
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float = 1e-6,
    ) -> None:
        self.bind("fused_add_rmsnorm", input, residual, weight, eps)
        demand(input.dim() == 2 and input.shape == residual.shape, "rows are added to as many rows")
        demand(input.dtype in (torch.float16, torch.bfloat16), "dtype")
        demand(input.dtype == residual.dtype == weight.dtype, "dtypes differ")
        demand(input.stride(-1) == 1 == residual.stride(-1), "the last dimension has to be contiguous")
        x = on_host(input).double() + on_host(residual).double()
        on_host(residual).copy_(x)
        on_host(input).copy_(x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * on_host(weight).double())

    def silu_and_mul(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - likewise
        self.bind("silu_and_mul", input)
        demand(input.dtype in (torch.float16, torch.bfloat16), "dtype")
        demand(input.is_contiguous(), "its strides would be ignored")
        demand(input.shape[-1] % 16 == 0, "the last dimension has to be a multiple of 32 bytes")
        gate, up = on_host(input).double().chunk(2, dim=-1)
        return on_device((torch.nn.functional.silu(gate) * up).to(input.dtype))

    def apply_rope_with_cos_sin_cache_inplace(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        head_size: int,
        cos_sin_cache: torch.Tensor,
        is_neox: bool = True,
    ) -> None:
        self.bind(
            "apply_rope_with_cos_sin_cache_inplace",
            positions,
            query,
            key,
            head_size,
            cos_sin_cache,
            is_neox=is_neox,
        )
        demand(cos_sin_cache.dtype == torch.float32, "cos_sin_cache should be float32")
        demand(positions.dtype in (torch.int32, torch.int64), "positions are integers")
        demand(_is_on_device(positions) and _is_on_device(cos_sin_cache), "tables are on the device")
        demand(query.dim() == 2 == key.dim() and len(query) == len(key) == len(positions), "shapes")
        demand(key.shape[1] > 0, "an empty key is undocumented")
        table = on_host(cos_sin_cache)[on_host(positions)].double()[:, None]
        cos, sin = table.chunk(2, dim=-1)
        for tensor in (query, key):
            heads = on_host(tensor).view(len(tensor), -1, head_size)
            if is_neox:
                first, second = heads.double().chunk(2, dim=-1)
                turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
            else:
                first, second = heads.double()[..., ::2], heads.double()[..., 1::2]
                pairs = first * cos - second * sin, second * cos + first * sin
                turned = torch.stack(pairs, dim=-1).flatten(-2)
            heads.copy_(turned)


class _Wrapper(ABC):
    """The common part of both wrappers: a plan, the memory in which it lies, and attention by page tables."""

    def __init__(self, library: FlashInferDouble, name: str) -> None:
        self._library, self._name = library, name
        self._last_use = 0  # number of the piece of work that last used the plan's memory
        self._plan: dict[str, Any] | None = None
        self.plans = 0

    @abstractmethod
    def start(self, *args: Any, **kwargs: Any) -> None:
        """Check the arguments with which the real wrapper is made."""

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        **scales: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._library.bind(
            f"{self._name}.run", None, q, paged_kv_cache, out=out, lse=lse, return_lse=return_lse, **scales
        )
        return self._attended(q, paged_kv_cache, out, lse, return_lse, **scales)

    def _begin(self, float_workspace: torch.Tensor, kv_layout: str, backend: str) -> None:
        demand(
            _is_on_device(float_workspace), "the workspace says where the wrapper runs, and is in host memory"
        )
        demand(float_workspace.dtype == torch.uint8, "the workspace is counted in bytes")
        demand(kv_layout in ("NHD", "HND"), f"layout {kv_layout}")
        demand(
            backend in ("fa2", "fa3"),
            f"backend {backend!r} is chosen by the first plan, and then kept for all plans",
        )
        self._layout, self.backend = kv_layout, backend

    def _planned(
        self,
        row_starts: torch.Tensor,
        page_starts: torch.Tensor,
        pages: torch.Tensor,
        last_page_len: torch.Tensor,
        heads: tuple[int, int],
        head_dim: int,
        page_size: int,
        options: dict[str, Any],
    ) -> None:
        demand(
            self._last_use <= self._library.work.done,
            "this plan overwrites the last one in pinned memory or on the device while it is still read",
        )
        self._last_use = self._library.work.give()
        self.plans += 1
        _check_table("row starts", row_starts, on_host=True)
        _check_table("page starts", page_starts, on_host=True)
        _check_table("page indices", pages, on_host=False)
        _check_table("last page lengths", last_page_len, on_host=True)
        demand(
            len(row_starts) == len(page_starts) == len(last_page_len) + 1, "tables are of different lengths"
        )
        demand(int(page_starts[-1]) == len(pages), "page indices are more or fewer than page starts say")
        demand(bool((page_starts.diff() > 0).all()), "a sequence has no page: its length would be negative")
        demand(
            bool(((last_page_len >= 1) & (last_page_len <= page_size)).all()),
            "1 <= last_page_len <= page_size",
        )
        demand(heads[0] % heads[1] == 0, "query heads do not share KV heads evenly")
        demand(options["q_data_type"] is not None, "q_data_type defaults to float16")
        self.split = split, never = options.get("fixed_split_size"), options.get("disable_split_kv", False)
        demand(self.backend == "fa2" or (split is None and not never), "fa3 ignores how keys are split")
        self._plan = {
            "row_starts": row_starts.tolist(), "page_starts": page_starts.tolist(), "pages": on_host(pages).clone(),
            "lengths": ((page_starts.diff() - 1) * page_size + last_page_len).tolist(), "heads": heads,
            "head_dim": head_dim, "page_size": page_size, **options,
        }  # fmt: skip

    def _attended(
        self,
        q: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        plan = self._plan
        demand(plan is not None, "run before plan")
        assert plan is not None
        self._last_use = self._library.work.give()
        demand(return_lse, "the log-sum-exp is computed only if asked for")
        keys, values = cache
        self._check(q, keys, values, plan)
        k, v = (
            on_host(one) if self._layout == "HND" else on_host(one).transpose(1, 2) for one in (keys, values)
        )
        scaled = {**plan, "sm_scale": plan["sm_scale"] * k_scale}
        result, sums = attend_pages(on_host(q), k, v, scaled)
        result *= v_scale
        if out is None:
            out = on_device(torch.empty(q.shape, dtype=q.dtype))
        if lse is None:
            lse = on_device(torch.empty(q.shape[:2], dtype=torch.float32))
        for name, given, shape, dtype in (
            ("out", out, q.shape, q.dtype),
            ("lse", lse, q.shape[:2], torch.float32),
        ):
            demand(_is_on_device(given), f"{name} is in host memory")
            demand(given.shape == shape and given.dtype == dtype, f"{name} is of another shape or dtype")
            demand(given.is_contiguous(), f"{name} has gaps")
        on_host(out).copy_(result)
        on_host(lse).copy_(sums)
        return out, lse

    def _check(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: dict[str, Any]) -> None:
        for name, tensor, dtype in (
            ("q", q, plan["q_data_type"]), ("K", keys, plan["kv_data_type"]), ("V", values, plan["kv_data_type"]),
        ):  # fmt: skip
            demand(_is_on_device(tensor), f"{name} is in host memory")
            demand(tensor.dtype == dtype, f"{name} is {tensor.dtype}, and {dtype} was planned")
            known = (torch.float16, torch.bfloat16) if name == "q" else KV_TYPES
            demand(dtype in known, f"there is no kernel for {name} in {dtype}")
            demand(tensor.stride(-1) == 1, f"{name} has gaps within a head")
        (query_heads, kv_heads), head_dim, page_size = plan["heads"], plan["head_dim"], plan["page_size"]
        demand(q.shape == (plan["row_starts"][-1], query_heads, head_dim), f"q is {tuple(q.shape)}")
        page = (kv_heads, page_size, head_dim) if self._layout == "HND" else (page_size, kv_heads, head_dim)
        demand(
            keys.dim() == 4 and keys.shape[1:] == page, f"pages of {tuple(keys.shape[1:])} are read as {page}"
        )
        demand(keys.shape == values.shape and keys.stride() == values.stride(), "V is read with K's strides")


class PrefillDouble(_Wrapper):
    """Stands for `BatchPrefillWithPagedKVCacheWrapper`."""

    def start(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", backend: str = "auto"
    ) -> None:
        self._begin(float_workspace_buffer, kv_layout, backend)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        **options: Any,
    ) -> None:
        tables = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        sizes = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        self._library.bind(f"{self._name}.plan", None, *tables, *sizes, **options)
        mask = options.pop("packed_custom_mask", None)
        if mask is not None:
            demand(self.backend == "fa2", "fa3 ignores the mask")
            demand(mask.dtype == torch.uint8 and _is_on_device(mask), "a packed mask is uint8 on the device")
            demand(
                len(qo_indptr) == 2,
                "the packed masks of several sequences would be addressed by bits as bytes",
            )
        rest = {"causal": False, "window_left": -1, "q_data_type": torch.float16, **options, "mask": mask}
        self._planned(*tables, (num_qo_heads, num_kv_heads), head_dim_qk, page_size, rest)


class DecodeDouble(_Wrapper):
    """Stands for `BatchDecodeWithPagedKVCacheWrapper`."""

    def start(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        self._begin(float_workspace_buffer, kv_layout, backend)
        self._tensor_cores = use_tensor_cores
        self._buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            self._buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
            for buffer in self._buffers:
                _check_table("a fixed buffer", buffer, on_host=False)

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        buffers = float_workspace_buffer, int_workspace_buffer
        self._library.bind(f"{self._name}.reset_workspace_buffer", None, *buffers)
        for buffer in buffers:
            demand(
                _is_on_device(buffer) and buffer.dtype == torch.uint8, "workspaces are bytes on the device"
            )

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        sizes = num_qo_heads, num_kv_heads, head_dim, page_size
        self._library.bind(f"{self._name}.plan", None, indptr, indices, last_page_len, *sizes, **options)
        if self._buffers is not None:
            fixed, fixed_indices, fixed_last = self._buffers
            demand(len(last_page_len) == len(fixed_last), "the batch size is fixed")
            demand(len(indices) <= len(fixed_indices), "more page indices than the buffer holds")
            demand(options.get("fixed_split_size") is None, "a fixed split cannot be captured")
            on_host(fixed).copy_(indptr)
            on_host(fixed_indices)[: len(indices)] = on_host(indices)
            on_host(fixed_last).copy_(last_page_len)
        rows = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        demand(
            self._tensor_cores or not (options.get("fixed_split_size") or options.get("disable_split_kv")),
            "without tensor cores, it ignores how keys are split",
        )
        demand(
            self._tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 3, 4, 8), "no kernel for this group"
        )
        rest = {"window_left": -1, "q_data_type": torch.float16, **options, "causal": False, "mask": None}
        self._planned(
            rows, indptr, indices, last_page_len, (num_qo_heads, num_kv_heads), head_dim, page_size, rest
        )
