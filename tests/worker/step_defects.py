"""Defects of a step on a GPU, each a change of the engine's source, that the tests on a CPU have to find.

    python -m tests.worker.step_defects   # plants each one, and runs the tests that have to find it

They are of the kinds that a GPU runs in silence: work that nobody waits for, memory that is used again too soon, captures of what
changes, and reads that stop the pipeline. The table of them in docs/gpu.md is written with that of FlashInfer's adapter.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "worker"
WATCHED, FAMILIES, CAPTURED, ORDERED, PLANE = (
    f"tests/worker/{name}.py"
    for name in (
        "model/test_device",
        "model/test_device_families",
        "model/test_decode_graphs",
        "model/test_step_order",
        "rank/test_nccl_plane",
    )
)
HOW = {
    WATCHED: "fake tensors under a watcher",
    FAMILIES: "fake tensors under a watcher",
    CAPTURED: "captured work that is run again",
    ORDERED: "streams that note what they are given",
    PLANE: "groups that note what they are given",
}
"""What each file of tests runs steps on."""


@dataclass(frozen=True)
class StepDefect:
    """A change of one file of the worker: `right` occurs once there, and becomes `wrong`; `tests` fail then."""

    name: str
    file: str
    right: str
    wrong: str
    tests: str


TRANSFORMER, GRAPHS, EXPERTS, QUANTISED, WRITER, NCCL = (
    f"medha_worker/{name}.py"
    for name in (
        "model/transformer",
        "model/decode_graphs",
        "model/experts_mlp",
        "kernels/quantised_rows",
        "kernels/torch_kv_writer",
        "rank/nccl_plane",
    )
)
STEP_DEFECTS = tuple(
    StepDefect(*fields)
    for fields in (
        ("A step reads a number from the device", TRANSFORMER, "        leaving = self._leaving(entering, hidden)\n",
         "        leaving = self._leaving(entering, hidden)\n        hidden.sum().item()\n", WATCHED),
        ("An index into the pool stays in host memory", WRITER, "_Scatter(self._device.place(torch.from_numpy(slots)))",
         "_Scatter(torch.from_numpy(slots))", WATCHED),
        ("Positions stay in host memory", TRANSFORMER, "self._rotations(self.device.place(positions))",
         "self._rotations(positions)", WATCHED),
        ("The host reads which experts have rows", EXPERTS, ".to(torch.int32)\n", ".to(torch.int32)\n    row_ends.tolist()\n",
         FAMILIES),
        ("The blocks of a weight's scales are found by an index in host memory", QUANTISED,
         "torch.arange(rows.start, rows.stop, device=self.scale.device)", "torch.arange(rows.start, rows.stop)", FAMILIES),
        ("A step does not wait for its tables", TRANSFORMER, "        step.ready.wait()\n", "", ORDERED),
        ("A step's tables are let go of while it runs", TRANSFORMER, "            self._in_flight.keep(step)\n", "            pass\n", ORDERED),
        ("Tables of a captured step are filled while it runs", GRAPHS, "        self._used.wait()\n", "", ORDERED),
        ("Fewer copies than steps in flight", GRAPHS, "return max(2, stages)", "return 2", CAPTURED),
        ("A copy is taken twice before it is replayed", GRAPHS, "return taken is None or taken.was_replayed", "return True", CAPTURED),
        ("A result lies in memory that all captures share", GRAPHS,
         "self._hidden.copy_(run_layers(self._entering, rotations(self._positions), self._step))",
         "self._hidden = run_layers(self._entering, rotations(self._positions), self._step)", CAPTURED),
        ("A captured step reads other memory than is filled", GRAPHS, "        self._entering[: len(entering)] = entering\n",
         "        self._entering = entering\n", CAPTURED),
        ("A step of another number of rows is replayed", GRAPHS, "self._sizes[bisect_left(self._sizes, rows)]",
         "self._sizes[0]", CAPTURED),
        ("Chunks are replayed as decodes", GRAPHS, "span.row_count == 1 and span.is_causal", "span.is_causal", CAPTURED),
        ("Padding writes into a sequence's block", GRAPHS, "[kv_cache.scratch_block]", "[0]", CAPTURED),
        ("Padding rows are returned", GRAPHS, "self._step.replay(entering)[: self._rows]", "self._step.replay(entering)", CAPTURED),
        ("Hidden states are used before they arrive", NCCL, "        if expected is not None:\n            expected.block_current_stream()\n",
         "", PLANE),
        ("Memory is overwritten while it is sent", NCCL, "            self._sending[0].block_current_stream()\n", "            pass\n", PLANE),
        ("A lane's result is used before it arrives", NCCL, "            started.work.block_current_stream()\n", "            pass\n", PLANE),
        ("A receive waits behind the running step", NCCL, "            self._device.runtime.ahead(),  # without waiting for the running step\n",
         "", PLANE),
    )
)  # fmt: skip


def is_found(defect: StepDefect) -> bool:
    """Plant a defect in a copy of the worker, and return True if its tests fail."""
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "worker"
        shutil.copytree(WORKER, copied, ignore=shutil.ignore_patterns("__pycache__"))
        file = copied / defect.file
        file.write_text(planted(defect), encoding="utf-8")
        others = [ROOT / name for name in ("core", "router", "operator", "sim", "cli", "papers")]
        path = os.pathsep.join(map(str, [copied, *others]))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", defect.tests]
        environment = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode in (0, 1), done.stdout + done.stderr
        return done.returncode == 1


def planted(defect: StepDefect) -> str:
    """Return the text of the file with the defect."""
    text = (WORKER / defect.file).read_text(encoding="utf-8")
    found = text.count(defect.right)
    assert found == 1, f"{defect.right!r} occurs {found} times in {defect.file}: follow it with the defect"
    return text.replace(defect.right, defect.wrong)


def table() -> str:
    """Return the table of docs/gpu.md."""
    rows = [f"| {defect.name} | {HOW[defect.tests]} | `{defect.tests}` |" for defect in STEP_DEFECTS]
    return "\n".join(["| Defect | Found on | Test |", "|---|---|---|", *rows])


def main() -> None:
    for defect in STEP_DEFECTS:
        print(f"{'found' if is_found(defect) else 'NOT FOUND'}: {defect.name}", flush=True)


if __name__ == "__main__":
    main()
