"""What clients see when a process is stopped, or cut off from the others: the same text, some seconds later."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RECOVERY = Path(__file__).parents[2] / "benchmarks" / "recovery.py"
# Recovering is waiting, most of the time, so that three replicas share the machine.
FAILURES = (
    ["--only", "stop router", "--only", "stop controller"],
    ["--only", "kill rank 0", "--only", "stop rank"],
    ["--only", "cut", "--cut-seconds", "5"],
)


@pytest.mark.timeout(300)
def test_streams_outlive_every_process_that_is_stopped_or_cut_off() -> None:
    """Complete and with the same text, with no process and no shared memory left: else the exit status is 1.

    So it is where the controller still holds KV 10 s after its router was cut off.
    """
    if (
        subprocess.run(["unshare", "--map-root-user", "--net", "--mount", "true"], check=False).returncode
        != 0
    ):
        pytest.skip("no network namespaces can be made here")
    runs = [
        subprocess.Popen(
            [sys.executable, str(RECOVERY), "--quick", *failures],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for failures in FAILURES
    ]
    outputs = [run.communicate()[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], "\n".join(outputs)
    assert sum("4 complete, 4 the same" in line for output in outputs for line in output.splitlines()) == 9
    assert "cut router, until its KV is free" in outputs[2]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shape", ["2,2,2", "1,1,1"])
def test_streams_outlive_fifty_random_failures(shape: str) -> None:
    command = [sys.executable, str(RECOVERY), "--failures", "50", "--shape", shape]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
