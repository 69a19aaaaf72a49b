"""Everything here runs on one thread: the tests share a small machine, and results do not depend on the count."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
