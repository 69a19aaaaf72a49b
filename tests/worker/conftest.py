"""Everything here runs on one thread: the tests share a small machine, and results do not depend on the count."""

import os

import pytest

# Some virtual machines announce AMX and then fault on it (SIGILL in oneDNN's bfloat16 products, transformers' too).
# A cap, not a demand: processors without these instructions are not affected. Read when torch first multiplies.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
