"""When a process is stuck; what its beats do is tested with the supervisor that hears them."""

import os
import subprocess
import sys

from medha_process.watchdog import AWAY_SECONDS, Deadline


def test_a_main_loop_that_does_not_return_in_time_has_missed_its_deadline() -> None:
    deadline = Deadline()
    assert deadline.missed(1e9) is None, "no deadline was set"
    deadline.renew(100.0, 4.0, "step 7")
    deadline.missed(100.0)
    for now in (101.0, 102.0, 103.0, 104.0):
        assert deadline.missed(now) is None
    assert deadline.missed(104.5) == "step 7"
    deadline.renew(104.6, 4.0, "step 8")
    assert deadline.missed(105.0) is None


def test_time_in_which_the_whole_process_stood_still_does_not_count() -> None:
    deadline = Deadline()
    deadline.renew(0.0, 4.0, "step 7")
    deadline.missed(1.0)
    assert deadline.missed(101.0) is None
    assert deadline.missed(101.0 + AWAY_SECONDS) is None
    assert deadline.missed(101.0 + 2 * AWAY_SECONDS) == "step 7"


def test_a_stuck_process_ends_itself_and_logs_where_it_was_stuck() -> None:
    program = (
        "import time\n"
        "from medha_process.watchdog import Watchdog\n"
        "Watchdog().allow(-1.0, 'a collective')\n"
        "time.sleep(60)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ}
    )
    assert ended.returncode == -9
    assert "stuck in a collective" in ended.stderr
