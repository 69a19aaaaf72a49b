"""Run all of these tests on one thread: they share a small machine, and results do not depend on the thread count."""

import os

import pytest

# Some virtual machines announce AMX and then fault on it (SIGILL in oneDNN's bfloat16 products, transformers' too).
# This is an upper bound: processors without these instructions are not affected. Torch reads it at its first product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
