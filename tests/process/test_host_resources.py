"""The limit on open files, in processes of their own: a limit that is lowered here would stay."""

import subprocess
import sys

import pytest

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
