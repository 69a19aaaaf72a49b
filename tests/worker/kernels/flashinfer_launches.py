"""Run the adapter on FlashInfer's compiled planner and launch code, and compare each launch with what the step needs.

    LD_PRELOAD=<shim of cudart_shim.c> python -m tests.worker.kernels.flashinfer_launches

It needs no GPU: the shim stands for CUDA's runtime. No kernel runs, so that results are not looked at; what is looked at is
what each kernel would have been given: grid, block, pages and their size, lengths, strides, and the addresses of q, K and V.
A line of JSON says what was equal in each step.
The modules are compiled, and lie where FlashInfer finds them (`compiled_modules`). With `--defects`, each defect of the adapter
is planted, and what sees it is printed as JSON.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from medha_worker.device import host_device
from medha_worker.kernels.flashinfer.flashinfer_attention import FlashInferAttention
from medha_worker.kernels.sequence_span import SequenceSpan

from .flashinfer_cases import HEAD_DIM, PACKAGE, Case, Chunk
from .flashinfer_defects import DEFECTS, ROWS, STEPS, planted
from .flashinfer_real import without_pinned_memory

MOST_LAUNCHES, PROCESSORS, BLOCKS_OF_A_PROCESSOR = 256, 132, 2
"""The shim's."""
NO_MASK, CAUSAL, MASK = 0, 1, 2
"""FlashInfer's numbers for how rows see keys."""
LEAST_PART_TOKENS = 128
"""Keys below which FlashInfer does not split."""

CASES = (
    *STEPS,
    Case([Chunk(300, 500), Chunk(7, 40)], block_tokens=16),
    Case([Chunk(1, 8000)], block_tokens=16),
    Case([Chunk(1, 8000), Chunk(1, 20)], block_tokens=16),
    Case([Chunk(1, 100), Chunk(1, 9)], block_tokens=16),
    Case([Chunk(40, 3000, stride=2)], block_tokens=16),
)
"""Steps whose launches are compared: decodes, chunks, contexts, strided chunks, and keys that are split."""


class LaunchRecord(ctypes.Structure):
    """What the shim notes of a launch."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("name", ctypes.c_char_p), ("first", ctypes.c_ubyte * 384)
    )  # fmt: skip


class PagedParameters(ctypes.Structure):
    """The argument of FlashInfer 0.7's kernels for paged attention, as far as it is read here; addresses are integers."""

    _fields_ = (
        ("q", ctypes.c_uint64), ("page_division", ctypes.c_uint32 * 4), ("page_tokens", ctypes.c_uint32),
        ("heads", ctypes.c_uint32), ("head_dim", ctypes.c_uint32), ("sequences", ctypes.c_uint32),
        ("strides", ctypes.c_uint32 * 6), ("keys", ctypes.c_uint64), ("values", ctypes.c_uint64), ("pages", ctypes.c_uint64),
        ("page_starts", ctypes.c_uint64), ("last_page_tokens", ctypes.c_uint64), ("rope", ctypes.c_uint64),
        ("row_starts", ctypes.c_uint64), ("output", ctypes.c_uint64), ("sums", ctypes.c_uint64),
        ("group_division", ctypes.c_uint32 * 4), ("group", ctypes.c_uint32), ("mask", ctypes.c_uint64),
        ("mask_starts", ctypes.c_uint64), ("variants", ctypes.c_uint64 * 6), ("soft_cap", ctypes.c_double),
        ("scale", ctypes.c_double), ("rope_factors", ctypes.c_double * 2), ("items", ctypes.c_int64),
        ("query_heads", ctypes.c_uint32), ("row_stride", ctypes.c_uint32), ("head_stride", ctypes.c_uint32),
        ("fp4_strides", ctypes.c_uint32 * 6), ("window_left", ctypes.c_int32), ("tables", ctypes.c_uint64 * 6),
    )  # fmt: skip


@dataclass(frozen=True)
class Attention:
    """A launch of paged attention.

    Attributes:
        parts: Thread blocks per KV head, grid.x; each takes a tile of rows and a part of the keys.
        grid_heads: KV heads, grid.z.
        warps: Warps along rows, and along keys.
        page_tokens, heads, sequences: Sizes of a page, of the pool, and of the batch.
        strides: Of pages, tokens and heads of K, and then of V.
        keys, values: Addresses.
        rows: Address of q's first row, or None if rows were gathered.
        query_heads, row_stride, scale: Of q, and the factor on scores.
        row_starts, pages, lengths: Of each sequence.
        masking: 0: none, 1: causal, 2: by a mask.
        mask: Which keys each row sees, row by row, if there is a mask.
        window_left: Keys that a row sees before its own; -1: all.
    """

    parts: int
    grid_heads: int
    warps: tuple[int, int]
    page_tokens: int
    heads: int
    sequences: int
    strides: tuple[int, ...]
    keys: int
    values: int
    rows: int | None
    query_heads: int
    row_stride: int | None
    scale: float
    row_starts: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    masking: int
    mask: tuple[bool, ...] | None
    window_left: int


@dataclass(frozen=True)
class Merge:
    """A launch that merges results: those of split keys, or of two batches."""

    grid: tuple[int, ...]
    block: tuple[int, ...]


MERGE_OF_PARTS = Merge((PROCESSORS, 1, 1), (HEAD_DIM // 8, 128 // (HEAD_DIM // 8), 1))
"""It merges the parts of few rows: one thread block for each processor."""


class Mismatch(Exception):
    """Launches are not what the step needs."""


def taken() -> list[Attention | Merge]:
    """Return the launches since the last call. What they were given has to be still there."""
    records = (LaunchRecord * MOST_LAUNCHES)()
    count = ctypes.CDLL(None).taken_launches(records)
    return [_read(record) for record in records[:count]]


def _read(record: LaunchRecord) -> Attention | Merge:
    grid, block, name = tuple(record.grid), tuple(record.block), record.name.decode()
    if "MergeState" in name:
        return Merge(grid, block)
    masking = re.search(r"PagedKVCacheKernel.*MaskModeE(\d)E", name)
    assert masking, f"a kernel that is not known: {name!r}"
    given = PagedParameters.from_buffer(record.first)
    starts = _integers(given.page_starts, given.sequences + 1)
    tables = [tuple(_integers(given.pages + 4 * start, stop - start)) for start, stop in pairwise(starts)]
    last = _integers(given.last_page_tokens, given.sequences)
    lengths = tuple(
        (len(table) - 1) * given.page_tokens + tokens for table, tokens in zip(tables, last, strict=True)
    )
    row_starts = tuple(_integers(given.row_starts, given.sequences + 1))
    mask = None
    if given.mask:
        bits = row_starts[-1] * lengths[0]
        packed = (ctypes.c_ubyte * -(-bits // 8)).from_address(given.mask)
        mask = tuple(bool(packed[bit // 8] >> bit % 8 & 1) for bit in range(bits))
    return Attention(
        grid[0], grid[2], (block[1], block[2]), given.page_tokens, given.heads,
        given.sequences, tuple(given.strides), given.keys, given.values, given.q, given.query_heads, given.row_stride,
        given.scale, row_starts, tuple(tables), lengths, int(masking[1]), mask, given.window_left,
    )  # fmt: skip


def _integers(address: int, count: int) -> list[int]:
    return list((ctypes.c_int32 * count).from_address(address))


@dataclass(frozen=True)
class Group:
    """Spans that take one launch: the keys `first .. stop` of each, and how rows see them."""

    ends: Sequence[tuple[SequenceSpan, int, int]]
    masking: int


def wanted(
    case: Case, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> Iterator[Attention | Merge]:
    """Yield the launches that a step needs, in order; `parts` is 0 where FlashInfer may choose how often it splits."""
    spans = case.spans()
    own_windows = [span for span in spans if span.has_window]
    chunks = [span for span in spans if span.row_count > 1 and span not in own_windows]
    whole = [
        ([span for span in spans if span.row_count == 1 and span not in own_windows], NO_MASK),
        ([span for span in chunks if span.is_causal and span.stride == 1], CAUSAL),
        ([span for span in chunks if not span.is_causal], NO_MASK),
    ]
    for group, masking in whole:
        if group:
            ends = [(span, _first_seen(span, case), span.total_length) for span in group]
            yield from _launches(case, Group(ends, masking), q, keys, values)
    for span in spans:
        if span in own_windows:
            own = [(span, span.first_seen, span.total_length)]
            yield from _launches(case, Group(own, MASK), q, keys, values)
        elif span in chunks and span.stride > 1:
            first = span.context_length if case.window_tokens is None else _first_seen(span, case)
            own = [(span, first, span.total_length)]
            yield from _launches(case, Group(own, MASK), q, keys, values)
            if span.context_length and case.window_tokens is None:
                before = Group([(span, 0, span.context_length)], NO_MASK)
                yield from _launches(case, before, q, keys, values)
                yield Merge((span.row_count, 1, 1), (HEAD_DIM // 8, case.sizes.query_heads, 1))


def _first_seen(span: SequenceSpan, case: Case) -> int:
    """Return the first key that the first row sees."""
    return 0 if case.window_tokens is None else max(0, span.context_length + 1 - case.window_tokens)


def _launches(
    case: Case, group: Group, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> Iterator[Attention | Merge]:
    size, heads = case.block_tokens, case.kv_heads
    pages = [
        tuple(int(page) for page in span.blocks[first // size : -(-stop // size)])
        for span, first, stop in group.ends
    ]
    rows = [span.row_count for span, _, _ in group.ends]
    packed = sum(rows) * case.group // len(rows)
    tile = 16 if packed <= 16 else 64 if packed <= 64 else 128
    tiles = [-(-count * case.group // tile) for count in rows]
    is_split = max(map(len, pages)) * size > LEAST_PART_TOKENS and sum(tiles) < most_parts(case)
    span, first, _ = group.ends[0]
    lies_together = group.ends[-1][0].rows.stop - span.rows.start == sum(rows)
    yield Attention(
        parts=0 if is_split else sum(tiles),
        grid_heads=heads,
        warps=(1, 4) if tile == 16 else (4, 1),
        page_tokens=size,
        heads=heads,
        sequences=len(rows),
        strides=(size * HEAD_DIM, HEAD_DIM, keys.stride(0)) * 2,
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        rows=q[span.rows.start :].data_ptr() if lies_together else None,
        query_heads=case.sizes.query_heads,
        row_stride=q.stride(0) if lies_together else None,
        scale=HEAD_DIM**-0.5,
        row_starts=tuple(accumulate(rows, initial=0)),
        pages=tuple(pages),
        lengths=tuple(stop - first // size * size for _, first, stop in group.ends),
        masking=group.masking,
        mask=_mask(case, span, first // size * size) if group.masking == MASK else None,
        window_left=-1 if case.window_tokens is None or group.masking == MASK else case.window_tokens - 1,
    )
    if is_split:
        busy = min(BLOCKS_OF_A_PROCESSOR, -(-sum(rows) * case.sizes.query_heads // PROCESSORS))
        yield replace(MERGE_OF_PARTS, grid=(PROCESSORS * busy, 1, 1))


def _mask(case: Case, span: SequenceSpan, begin: int) -> tuple[bool, ...]:
    """Return which keys from `begin` on each row sees in a launch with a mask: without a window, its own tokens alone."""
    seen = []
    for row in range(span.row_count):
        own = span.context_length + span.stride * row if span.is_causal else span.context_length - 1
        first = span.context_length if case.window_tokens is None else own - case.window_tokens + 1
        if span.has_window:
            first = span.first_key + span.first_stride * row
        seen += [first <= key <= own for key in range(begin, span.total_length)]
    return tuple(seen)


def most_parts(case: Case) -> int:
    """Return how many thread blocks per KV head FlashInfer starts at most, if it splits keys as it likes."""
    return BLOCKS_OF_A_PROCESSOR * PROCESSORS // case.kv_heads


def compare(case: Case, found: Sequence[Attention | Merge], needed: Sequence[Attention | Merge]) -> None:
    """Raise Mismatch if launches are not those that are needed."""
    if [type(one) for one in found] != [type(one) for one in needed]:
        names = [[type(one).__name__ for one in launches] for launches in (found, needed)]
        raise Mismatch(f"launches {names[0]}, and not {names[1]}")
    for number, (ours, theirs) in enumerate(zip(found, needed, strict=True)):
        if isinstance(ours, Attention) and isinstance(theirs, Attention):
            free = {name: None for name in ("rows", "row_stride") if getattr(theirs, name) is None}
            if not theirs.parts and theirs.sequences < ours.parts <= most_parts(case):
                free["parts"] = 0
            ours = replace(ours, **free)
        if ours != theirs:
            names = [name for name, value in vars(theirs).items() if getattr(ours, name) != value]
            values = ", ".join(f"{name} {getattr(ours, name)}, not {getattr(theirs, name)}" for name in names)
            raise Mismatch(f"launch {number}: {values}")


def run(library: Any, package: str, case: Case) -> Sequence[Attention | Merge]:
    """Plan and attend a step twice, and compare its launches; return those of one time."""
    made = importlib.import_module(f"{package}.flashinfer_attention").FlashInferAttention
    attention = made(library, host_device(case.dtype), case.sizes)
    q, keys, values, _ = case.tensors()
    needed = list(wanted(case, q, keys, values))
    for _ in range(2):
        step = attention.plan(case.spans(), case.block_tokens, case.window_tokens)
        step.attend(q, keys, values)
        found = taken()
        compare(case, found, needed)
        del step
    return found


def run_captured(library: Any) -> Sequence[Attention | Merge]:
    """Replan captured decodes, and compare: grids stay as they were captured, and tables follow the step.

    Return the launches of all replays.
    """
    case = Case([Chunk(1, 0)] * 3, block_tokens=16)
    attention = FlashInferAttention(library, host_device(case.dtype), case.sizes)
    graph = attention.for_graph(3, 600)
    assert graph is not None
    launches: list[Attention | Merge] = []
    for contexts in ((9, 0, 14), (8000, 3, 100), (1, 700, 0)):
        case = replace(case, chunks=[Chunk(1, context) for context in contexts])
        q, keys, values, _ = case.tensors()
        first, *_ = wanted(case, q, keys, values)
        assert isinstance(first, Attention)
        graph.replan(case.spans(), case.block_tokens)
        graph.attend(q, keys, values)
        found = taken()
        compare(case, found, [replace(first, parts=most_parts(case)), MERGE_OF_PARTS])
        launches += found
    return launches


def equal_launches(step: str, launches: Sequence[Attention | Merge]) -> dict[str, Any]:
    """Return what has been compared in a step, launch by launch; `masking` is 0: none, 1: causal, 2: by a mask."""
    attention = [one for one in launches if isinstance(one, Attention)]
    return {
        "step": step,
        "launches_of_attention": len(attention),
        "launches_of_merges": len(launches) - len(attention),
        "thread_blocks": [one.parts * one.grid_heads for one in attention],
        "kv_heads": [one.heads for one in attention],
        "page_tokens": [one.page_tokens for one in attention],
        "pages": [sum(map(len, one.pages)) for one in attention],
        "masking": [one.masking for one in attention],
    }


def seen_by(library: Any, package: str) -> str:
    """Return what sees a defect in a copy of the adapter: its own "assertion", FlashInfer, which "refused" it, the "launches"."""
    try:
        for case in CASES:
            run(library, package, case)
    except AssertionError:
        return "assertion"
    except Mismatch as mismatch:
        print(f"{package}: {mismatch}", file=sys.stderr)
        return "launches"
    except Exception as error:  # noqa: BLE001 - FlashInfer raises what it likes
        print(f"{package}: {type(error).__name__}: {error}", file=sys.stderr)
        return "refused"
    return "nothing"


def installed() -> Any:
    """Return the package `flashinfer` with its own compiled code, on tensors in host memory."""
    library = importlib.import_module("flashinfer")
    without_pinned_memory()
    for name in ("prefill", "decode"):  # what an H100 does
        importlib.import_module(f"flashinfer.{name}").device_support_pdl = lambda device: True
    cascade = importlib.import_module("flashinfer.cascade")
    compiled = cascade.get_cascade_module()
    from_dlpack = importlib.import_module("tvm_ffi").from_dlpack

    def merged(*given: Any) -> None:
        compiled.merge_state_in_place(
            *(None if one is None else from_dlpack(ClaimsDevice(one)) for one in given)
        )

    cascade.get_cascade_module = lambda: SimpleNamespace(merge_state_in_place=merged)
    return library


class ClaimsDevice:
    """A tensor in host memory that says that it is on a GPU: merging asks for one."""

    CUDA = (2, 0)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.CUDA

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._tensor.__dlpack__()
        pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
        pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        address = pointer_of(capsule, b"dltensor")
        # A capsule begins with the data's address, followed by kind and number of its device.
        (ctypes.c_int32 * 2).from_address(address + 8)[:] = self.CUDA
        return capsule


def main() -> None:
    library = installed()
    if "--defects" not in sys.argv:
        for case in CASES:
            print(json.dumps(equal_launches(str(case), run(library, PACKAGE, case))))
        print(json.dumps(equal_launches("captured decodes, replayed three times", run_captured(library))))
        return
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        seen = {
            defect.name: seen_by(library, planted(defect, Path(folder)))
            for defect in DEFECTS
            if defect.file != ROWS
        }
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
