"""The race in Triton: its arithmetic in Triton's interpreter, and its compiled form for three generations of GPUs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from medha_worker.device import HOST, Device, HostMemory, InOrder
from medha_worker.kernels.name_table import torch_kernels
from medha_worker.kernels.protocol import TokenRace
from medha_worker.kernels.torch_race import DenseRace

INTERPRETED = """
import torch
from medha_worker.kernels.random_stream import GOLDEN_GAMMA
from medha_worker.kernels.torch_race import DenseRace
from medha_worker.kernels.triton import triton_race

torch.manual_seed(0)
for rows, vocab in ((3, 7), (2, 1024), (2, 3001), (5, 2049)):
    logits = torch.randn(rows, vocab, dtype=torch.float64) * 3
    logits -= logits.amax(1, keepdim=True)
    logits[logits < -6] = -float("inf")
    keys = torch.randint(-(2**63), 2**63 - 1, (rows,))
    wanted = DenseRace().winners(logits.clone(), keys)
    found = triton_race.TritonRace().winners(logits.clone(), keys)
    assert torch.equal(found, wanted), (rows, vocab, found, wanted)
# With flat scores, the noise alone decides: a hash that is wrong in one bit shows.
flat = torch.zeros(60, 4096, dtype=torch.float64)
keys = torch.arange(60) * 7919 - 30
assert torch.equal(triton_race.TritonRace().winners(flat.clone(), keys), DenseRace().winners(flat.clone(), keys))
# A view of every second row: rows lie apart.
apart = torch.randn(8, 500, dtype=torch.float64)[::2]
assert torch.equal(triton_race.TritonRace().winners(apart, keys[:4]), DenseRace().winners(apart.clone(), keys[:4]))
print("equal")
"""

COMPILED = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from medha_worker.kernels.triton.triton_race import TOKENS, race_kernel

signature = {"scores": "*fp64", "keys": "*i64", "best": "*fp64", "tokens": "*i64", "row_stride": "i32", "vocab": "i32",
             "parts": "i32", "size": "constexpr"}
source = ASTSource(fn=race_kernel, signature=signature, constexprs={"size": TOKENS})
capability = int(sys.argv[1])
compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
assert f".target sm_{capability}" in compiled.asm["ptx"]
assert len(compiled.asm["cubin"]) > 1000
print("compiled")
"""


def printed(code: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=240, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_interpreted_kernel_finds_the_winners_of_plain_torch() -> None:
    assert printed(INTERPRETED, TRITON_INTERPRET="1") == "equal\n"


def test_a_wrong_constant_of_the_hash_is_found() -> None:
    planted = INTERPRETED.replace(
        "torch.manual_seed(0)",
        "import triton.language as tl\ntriton_race._SECOND = tl.constexpr(0x94D049BB133111ED)",
        1,
    )
    assert planted != INTERPRETED
    with pytest.raises(AssertionError):
        printed(planted, TRITON_INTERPRET="1")


@pytest.mark.parametrize(
    "capability", [pytest.param(80, marks=pytest.mark.long), 90, pytest.param(100, marks=pytest.mark.long)]
)
def test_the_kernel_compiles_without_a_gpu(capability: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = str(tmp_path_factory.mktemp("triton"))
    assert printed(COMPILED, str(capability), TRITON_CACHE_DIR=cache) == "compiled\n"


def race_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> TokenRace:
    """Return the race of a device that says that it is a GPU, and keeps its tensors in host memory."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 0))
    device = Device(torch.device("cuda", 0), torch.bfloat16, HostMemory(), InOrder(HOST))
    return torch_kernels(device).race


def test_where_triton_cannot_run_the_race_plain_torch_does_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in an image without a C compiler: what Triton compiles at its first run is missed before a request."""
    assert type(race_on_a_gpu(monkeypatch)) is DenseRace
    assert "tokens are sampled by plain torch, because triton fails (" in caplog.text


def test_the_race_in_triton_has_run_before_it_is_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_race = pytest.importorskip("medha_worker.kernels.triton.triton_race")
    seen = []
    monkeypatch.setattr(
        triton_race.TritonRace, "winners", lambda _, scores, keys: seen.append((scores.dtype, keys.dtype))
    )
    assert type(race_on_a_gpu(monkeypatch)) is triton_race.TritonRace
    assert seen == [(torch.float64, torch.int64)]
