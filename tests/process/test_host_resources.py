"""The limit on open files, in processes of their own: a limit that is lowered here would stay. And the GPUs of a machine."""

import subprocess
import sys
from pathlib import Path

import pytest

from medha_process.host_resources import has_nvidia_gpu

PROGRAM = """
import os, resource, subprocess, sys
from medha_process.host_resources import raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
limit = raise_file_limit()
assert limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(limit - 20)]  # that many can really be open
for file in opened:
    os.close(file)
subprocess.run([sys.executable, "-c", "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"])
"""


@pytest.mark.parametrize(("soft", "hard"), [(40, 200), (200, 200)])
def test_the_soft_limit_becomes_the_hard_one_and_children_inherit_it(soft: int, hard: int) -> None:
    program = PROGRAM.format(soft=soft, hard=hard)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) == hard


@pytest.mark.parametrize(
    ("files", "has_one"),
    [
        ((), False),
        (("nvidiactl", "nvidia0"), True),
        (("nvidiactl",), False),
        (("nvidia-uvm", "nvidia0"), False),
    ],
)
def test_a_machine_has_a_gpu_if_the_driver_offers_one(
    tmp_path: Path, files: tuple[str, ...], has_one: bool
) -> None:
    for file in files:
        (tmp_path / file).touch()
    assert has_nvidia_gpu(tmp_path) is has_one
