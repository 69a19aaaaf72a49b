"""Defects of the FlashInfer adapter, each a change of its source, that the tests on a CPU have to find.

    python -m tests.worker.kernels.flashinfer_defects   # writes the tables of them, of `step_defects.py` and of `proved_table.py` in docs/gpu.md

FlashInfer itself accepts most of them in silence. `test_flashinfer_defects.py` plants each one, and so does
`test_compiled_flashinfer.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import medha_worker.kernels.flashinfer as right

from ..step_defects import table as step_table
from .flashinfer_cases import PACKAGE, Case, Chunk
from .proved_table import proved_table

STEPS = (
    Case([Chunk(1, 9), Chunk(1, 0), Chunk(6, 4), Chunk(5, 11, is_causal=False), Chunk(1, 7)]),
    Case([Chunk(4, 10, stride=3), Chunk(3, 0, stride=2), Chunk(5, 16, stride=2)], block_tokens=3),
    Case([Chunk(1, 30), Chunk(9, 21), Chunk(4, 18, stride=2)], window_tokens=7, has_sinks=True, kv_heads=3),
    Case([Chunk(1, 40), Chunk(2, 2)], block_tokens=16, group=7),
    Case(
        [
            Chunk(5, 20, True, 1, 3, 1),
            Chunk(4, 16, False, 1, -2, 3),
            Chunk(1, 9, False, 1, 4),
            Chunk(3, 8, True, 2, 5),
        ]
    ),
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
    found_in_launches: str
    """What finds it when FlashInfer's compiled launch code runs without a GPU (`flashinfer_launches.py`): an "assertion" of
    the adapter, FlashInfer itself, which "refused" it, the "launches", or "nothing". "unasked": that code takes no part."""


def planted(defect: Defect, folder: Path) -> str:
    """Copy the adapter with a defect to a package in `folder`, and return the package's name."""
    name = "planted_" + re.sub(r"\W", "_", defect.name)
    (folder / name).mkdir()
    for path in Path(str(right.__file__)).parent.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.name == defect.file:
            found = text.count(defect.right)
            assert found == 1, (
                f"{defect.right!r} occurs {found} times in {path.name}: follow it with the defect"
            )
            text = text.replace(defect.right, defect.wrong)
        (folder / name / path.name).write_text(text.replace(PACKAGE, name), encoding="utf-8")
    return name


ATTENTION, TABLES = "flashinfer_attention.py", "page_tables.py"
POOL, ROWS = "wrapper_pool.py", "flashinfer_rows.py"
_VIEWS = "return pool_keys.view(shape).transpose(0, 1), pool_values.view(shape).transpose(0, 1)"
_LAST = "(keys.stop - 1) % block_tokens + 1 for keys"

DEFECTS = tuple(
    Defect(*fields)
    for fields in (
        ("Decodes read pages in another layout", POOL, '"HND", use_tensor_cores', '"NHD", use_tensor_cores', "double", "launches"),
        ("Chunks read pages in another layout", POOL, '"HND", backend=backend', '"NHD", backend=backend', "double", "launches"),
        ("The pool has its tokens before its heads", ATTENTION, _VIEWS, _VIEWS.replace("transpose(0, 1)", "permute(1, 2, 0, 3)"), "double", "launches"),
        ("The pool has its heads before its pages", ATTENTION, _VIEWS, _VIEWS.replace(".transpose(0, 1)", ""), "double", "launches"),
        ("K and V are exchanged", ATTENTION, _VIEWS, "return pool_values.view(shape).transpose(0, 1), pool_keys.view(shape).transpose(0, 1)", "result", "launches"),
        ("Pages have another size in the pool than in the plan", ATTENTION, "shape = kv_heads, pool_keys.shape[1] // block_tokens, block_tokens, head_dim", "shape = kv_heads, pool_keys.shape[1], 1, head_dim", "double", "launches"),
        ("Pages have another size in the plan than in the pool", ATTENTION, "block_tokens,\n            **self._options(window),\n        )\n\n    def _plan_chunks", "block_tokens + 1,\n            **self._options(window),\n        )\n\n    def _plan_chunks", "double", "nothing"),
        ("Log-sum-exps keep base 2", ATTENTION, "sums.mul_(math.log(2))", "sums.mul_(1)", "result", "nothing"),
        ("Log-sum-exps are converted the wrong way", ATTENTION, "sums.mul_(math.log(2))", "sums.div_(math.log(2))", "result", "nothing"),
        ("Page indices stay in host memory", ATTENTION, "self.device.place(torch.from_numpy(batch.pages))", "torch.from_numpy(batch.pages)", "double", "nothing"),
        ("Row indices stay in host memory", ATTENTION, "self.device.place(torch.from_numpy(batch.rows))", "torch.from_numpy(batch.rows)", "device", "nothing"),
        ("The mask stays in host memory", ATTENTION, "self.device.place(torch.from_numpy(batch.mask))", "torch.from_numpy(batch.mask)", "double", "nothing"),
        ("Starts are copied to the device", ATTENTION, "= torch.from_numpy(batch.page_starts),", "= self.device.place(torch.from_numpy(batch.page_starts)),", "double", "nothing"),
        ("Page indices have 64 bits", TABLES, "np.concatenate(tables).astype(np.int32)", "np.concatenate(tables)", "assertion", "assertion"),
        ("Starts have 64 bits", TABLES, "np.cumsum(counts))).astype(np.int32)", "np.cumsum(counts)))", "assertion", "assertion"),
        ("A full last page counts as empty", TABLES, _LAST, "keys.stop % block_tokens for keys", "assertion", "assertion"),
        ("The last page has a key too few", TABLES, _LAST, "max(1, (keys.stop - 1) % block_tokens) for keys", "result", "launches"),
        ("The last page has a key too many", TABLES, _LAST, "min(block_tokens, (keys.stop - 1) % block_tokens + 2) for keys", "double", "launches"),
        ("A page too few", TABLES, "-(-keys.stop // block_tokens)", "max(1, keys.stop // block_tokens)", "double", "launches"),
        ("Pages are taken from the start in spite of a window's mask", TABLES, "[keys.first // block_tokens for keys in group]", "[0 for _ in group]", "double", "launches"),
        ("Chunks are not causal, which is the default", ATTENTION, "causal=causal,", "", "result", "launches"),
        ("Queries have the default type", ATTENTION, '"q_data_type": self.device.dtype,', '"q_data_type": torch.float16,', "double", "refused"),
        ("Scores are scaled by the wrong size", ATTENTION, "1.0 / math.sqrt(self._sizes[2])", "1.0 / math.sqrt(self._sizes[0])", "result", "launches"),
        ("A window counts the row's own key twice", ATTENTION, "window_tokens - 1", "window_tokens", "result", "launches"),
        ("A window is forgotten", ATTENTION, '"window_left": window,', '"window_left": -1,', "result", "launches"),
        ("The window of a lane's part stands still", TABLES, "span.first_key + span.first_stride * row", "span.first_key", "result", "launches"),
        ("The mask's bits are in the wrong order", TABLES, 'bitorder="little"', 'bitorder="big"', "result", "launches"),
        ("The mask shows keys of the context a second time", TABLES, "seen = (key >= lowest) & (key <= last_seen)", "seen = key <= last_seen", "result", "launches"),
        ("The mask hides a row's own key", TABLES, "& (key <= last_seen)", "& (key < last_seen)", "double", "launches"),
        ("A strided chunk counts as causal", TABLES, "elif span.stride == 1:", "elif span.stride:", "result", "launches"),
        ("A context alone counts as causal", TABLES, "elif not span.is_causal:", "elif span.row_count == 0:", "result", "launches"),
        ("The implementation for masks ignores masks", POOL, 'kind == "wide"', 'kind in ("wide", "masked")', "double", "refused"),
        ("The second part of a chunk replaces the first", ATTENTION, "attention.library.merge_state_in_place(output[rows], sums[rows], part, part_sums)", "output[rows] = part", "result", "launches"),
        ("Scattered rows are written side by side", ATTENTION, "output.index_copy_(0, rows, part)", "output[: len(part)] = part", "result", "nothing"),
        ("Rows that lie apart count as a slice", TABLES, "if last - first + 1 == len(self.rows) else None", "", "double", "refused"),
        ("Sinks are left to FlashInfer, which ignores them", ATTENTION, "if sinks is None else add_sinks(output, sums, sinks)", "", "result", "nothing"),
        ("Sinks are added while sums have base 2", ATTENTION, "add_sinks(output, sums, sinks)", "add_sinks(output, sums / math.log(2), sinks)", "result", "nothing"),
        ("A plan overwrites one that is being staged", POOL, "if planned.is_done() and used.is_done():", "if True:", "double", "nothing"),
        ("A plan overwrites one that a kernel reads", POOL, "if planned.is_done() and used.is_done():", "if planned.is_done():", "double", "nothing"),
        ("Pairs of a rotation are neighbours", ROWS, "is_neox=True", "is_neox=False", "result", "unasked"),
        ("The last head is not turned", ROWS, "heads[:, -1:].view(rows, head_dim)", "heads[:, -1:].clone().view(rows, head_dim)", "result", "unasked"),
        ("Angles are in the model's type", ROWS, "torch.cat([cos, sin], dim=1).float()", "torch.cat([cos, sin], dim=1)", "double", "unasked"),
        ("Sines come before cosines", ROWS, "torch.cat([cos, sin], dim=1)", "torch.cat([sin, cos], dim=1)", "result", "unasked"),
        ("The sum is kept in place of what was added", ROWS, "fused_add_rmsnorm(part, hidden", "fused_add_rmsnorm(hidden, part", "result", "unasked"),
        ("The sum is returned in place of its norm", ROWS, "        return part\n", "        return hidden\n", "result", "unasked"),
        ("The gate is read with gaps between rows", ROWS, "gate_up.contiguous()", "gate_up", "double", "unasked"),
    )
)  # fmt: skip

PAGE = Path(__file__).parents[3] / "docs" / "gpu.md"
_TABLE = re.compile(r"(?<=<!-- defects: written by `make gen` -->\n).*?(?=<!-- /defects -->)", re.DOTALL)
_STEP_TABLE = re.compile(
    r"(?<=<!-- step defects: written by `make gen` -->\n).*?(?=<!-- /step defects -->)", re.DOTALL
)
_PROVED_TABLE = re.compile(r"(?<=<!-- proved: written by `make gen` -->\n).*?(?=<!-- /proved -->)", re.DOTALL)
_STEPS = {
    "assertion": "an assertion", "double": "the double", "device": "two memories", "result": "the result",
}  # fmt: skip
_LAUNCHES = {
    "assertion": "an assertion", "refused": "FlashInfer", "launches": "the launches", "nothing": "-", "unasked": "",
}  # fmt: skip


def page_with_table() -> str:
    """Return docs/gpu.md with its tables of defects, and of what long tests have compared, as they have to be."""
    rows = [
        f"| {defect.name} | {_STEPS[defect.found_by]} | {_LAUNCHES[defect.found_in_launches]} |"
        for defect in DEFECTS
    ]
    table = "\n".join(["| Defect | Steps | Launch code |", "|---|---|---|", *rows])
    page = _TABLE.sub(lambda _: f"\n{table}\n\n", PAGE.read_text(encoding="utf-8"), count=1)
    page = _STEP_TABLE.sub(lambda _: f"\n{step_table()}\n\n", page, count=1)
    return _PROVED_TABLE.sub(lambda _: f"\n{proved_table()}\n\n", page, count=1)


if __name__ == "__main__":
    PAGE.write_text(page_with_table(), encoding="utf-8")
