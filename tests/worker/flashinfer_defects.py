"""Defects of the FlashInfer adapter, each a change of its source, that the tests on a CPU have to find.

FlashInfer itself accepts most of them in silence. `test_flashinfer_defects.py` plants each one.
"""

from __future__ import annotations

from dataclasses import dataclass

from .flashinfer_cases import Case, Chunk

STEPS = (
    Case([Chunk(1, 9), Chunk(1, 0), Chunk(6, 4), Chunk(5, 11, is_causal=False), Chunk(1, 7)]),
    Case(
        [Chunk(4, 10, stride=3), Chunk(3, 0, stride=2), Chunk(5, 16, stride=2)], block_tokens=3, split_pages=2
    ),
    Case([Chunk(1, 30), Chunk(9, 21), Chunk(4, 18, stride=2)], window_tokens=7, has_sinks=True, kv_heads=3),
    Case([Chunk(1, 40), Chunk(2, 2)], block_tokens=16, group=7),
)
"""Steps that together reach every kind of batch; each defect is run on all of them."""


@dataclass(frozen=True)
class Defect:
    """A change of one file: `right` occurs once there, and becomes `wrong`."""

    name: str
    file: str
    right: str
    wrong: str
    found_by: str
    """The check that finds it: an "assertion" of the adapter, the "double" that refuses a call, the "device" that refuses to mix
    memories, or the "result" that differs from plain torch's."""


ATTENTION, TABLES = "flashinfer_attention.py", "page_tables.py"
POOL, ROWS = "wrapper_pool.py", "flashinfer_rows.py"
_VIEWS = "return pool_keys.view(shape).transpose(0, 1), pool_values.view(shape).transpose(0, 1)"
_LAST = "(keys.stop - 1) % block_tokens + 1 for keys"

DEFECTS = tuple(
    Defect(*fields)
    for fields in (
        ("Decodes read pages in another layout", POOL, '"HND", use_tensor_cores', '"NHD", use_tensor_cores', "double"),
        ("Chunks read pages in another layout", POOL, '"HND", backend=backend', '"NHD", backend=backend', "double"),
        ("The pool has its tokens before its heads", ATTENTION, _VIEWS, _VIEWS.replace("transpose(0, 1)", "permute(1, 2, 0, 3)"), "double"),
        ("The pool has its heads before its pages", ATTENTION, _VIEWS, _VIEWS.replace(".transpose(0, 1)", ""), "double"),
        ("K and V are exchanged", ATTENTION, _VIEWS, "return pool_values.view(shape).transpose(0, 1), pool_keys.view(shape).transpose(0, 1)", "result"),
        ("Pages have another size in the pool than in the plan", ATTENTION, "shape = kv_heads, pool_keys.shape[1] // block_tokens, block_tokens, head_dim", "shape = kv_heads, pool_keys.shape[1], 1, head_dim", "double"),
        ("Pages have another size in the plan than in the pool", ATTENTION, "block_tokens,\n            fixed_split", "block_tokens + 1,\n            fixed_split", "double"),
        ("Log-sum-exps keep base 2", ATTENTION, "sums.mul_(math.log(2))", "sums.mul_(1)", "result"),
        ("Log-sum-exps are converted the wrong way", ATTENTION, "sums.mul_(math.log(2))", "sums.div_(math.log(2))", "result"),
        ("Page indices stay in host memory", ATTENTION, "self.device.place(torch.from_numpy(batch.pages))", "torch.from_numpy(batch.pages)", "double"),
        ("Row indices stay in host memory", ATTENTION, "self.device.place(torch.from_numpy(batch.rows))", "torch.from_numpy(batch.rows)", "device"),
        ("The mask stays in host memory", ATTENTION, "self.device.place(torch.from_numpy(batch.mask))", "torch.from_numpy(batch.mask)", "double"),
        ("Starts are copied to the device", ATTENTION, "= torch.from_numpy(batch.page_starts),", "= self.device.place(torch.from_numpy(batch.page_starts)),", "double"),
        ("Page indices have 64 bits", TABLES, "np.concatenate(tables).astype(np.int32)", "np.concatenate(tables)", "assertion"),
        ("Starts have 64 bits", TABLES, "np.cumsum(counts))).astype(np.int32)", "np.cumsum(counts)))", "assertion"),
        ("A full last page counts as empty", TABLES, _LAST, "keys.stop % block_tokens for keys", "assertion"),
        ("The last page has a key too few", TABLES, _LAST, "max(1, (keys.stop - 1) % block_tokens) for keys", "result"),
        ("The last page has a key too many", TABLES, _LAST, "min(block_tokens, (keys.stop - 1) % block_tokens + 2) for keys", "double"),
        ("A page too few", TABLES, "-(-keys.stop // block_tokens)", "max(1, keys.stop // block_tokens)", "double"),
        ("Pages are taken from the start in spite of a window's mask", TABLES, "keys.first // block_tokens, ", "0, ", "double"),
        ("Chunks are not causal, which is the default", ATTENTION, "causal=causal,", "", "result"),
        ("Queries have the default type", ATTENTION, '"q_data_type": self.device.dtype,', '"q_data_type": torch.float16,', "double"),
        ("Scores are scaled by the wrong size", ATTENTION, "1.0 / math.sqrt(self._sizes[2])", "1.0 / math.sqrt(self._sizes[0])", "result"),
        ("A window counts the row's own key twice", ATTENTION, "window_tokens - 1", "window_tokens", "result"),
        ("A window is forgotten", ATTENTION, '"window_left": window,', '"window_left": -1,', "result"),
        ("The mask's bits are in the wrong order", TABLES, 'bitorder="little"', 'bitorder="big"', "result"),
        ("The mask shows keys of the context a second time", TABLES, "seen = (key >= lowest) & (key <= last_seen)", "seen = key <= last_seen", "result"),
        ("The mask hides a row's own key", TABLES, "& (key <= last_seen)", "& (key < last_seen)", "double"),
        ("A strided chunk counts as causal", TABLES, "elif span.stride == 1:", "elif span.stride:", "result"),
        ("A context alone counts as causal", TABLES, "elif not span.is_causal:", "elif span.row_count == 0:", "result"),
        ("The implementation for masks ignores masks", POOL, '"fa2" if kind == "masked"', '"fa3" if kind == "masked"', "double"),
        ("The second part of a chunk replaces the first", ATTENTION, "library.merge_state_in_place(output[rows], sums[rows], part, part_sums)", "output[rows] = part", "result"),
        ("Scattered rows are written side by side", ATTENTION, "output.index_copy_(0, rows, part)", "output[: len(part)] = part", "result"),
        ("Rows that lie apart count as a slice", TABLES, "if last - first + 1 == len(self.rows) else None", "", "double"),
        ("Sinks are left to FlashInfer, which ignores them", ATTENTION, "if sinks is None else add_sinks(output, sums, sinks)", "", "result"),
        ("Sinks are added while sums have base 2", ATTENTION, "add_sinks(output, sums, sinks)", "add_sinks(output, sums / math.log(2), sinks)", "result"),
        ("A plan overwrites one that is being staged", POOL, "if planned.is_done() and used.is_done():", "if True:", "double"),
        ("A plan overwrites one that a kernel reads", POOL, "if planned.is_done() and used.is_done():", "if planned.is_done():", "double"),
        ("Pairs of a rotation are neighbours", ROWS, "is_neox=True", "is_neox=False", "result"),
        ("The last head is not turned", ROWS, "heads[:, -1:].view(rows, head_dim)", "heads[:, -1:].clone().view(rows, head_dim)", "result"),
        ("Angles are in the model's type", ROWS, "torch.cat([cos, sin], dim=1).float()", "torch.cat([cos, sin], dim=1)", "double"),
        ("Sines come before cosines", ROWS, "torch.cat([cos, sin], dim=1)", "torch.cat([sin, cos], dim=1)", "result"),
        ("The gate is read with gaps between rows", ROWS, "gate_up.contiguous()", "gate_up", "double"),
    )
)  # fmt: skip
