"""`medha up` with fake parts: `python fake_up.py FOLDER READY_SECONDS router=serve controller=... 'rank 0=...'`."""

import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from medha_cli.terminal_display import TerminalDisplay
from medha_process.supervision.supervisor import Part, StopRequests, supervise
from medha_process.supervision.supervisor_output import end_if_unread

folder = Path(sys.argv[1])
groups = []
for argument in sys.argv[3:]:
    name, behaviour = argument.split("=")
    fake = str(Path(__file__).with_name("fake_part.py"))
    argv = (sys.executable, "-S", "-u", fake, str(folder / f"{name}.ready"), *behaviour.split(":"))
    groups.append((Part(name, argv),))

with StopRequests() as requests:
    state = supervise(
        tuple(groups),
        run_directory=folder,
        is_ready=lambda: len(list(folder.glob("*.ready"))) == len(groups),
        display=TerminalDisplay(Console(), "fake", lambda pids: [Text(f"READY {pids}")]),
        ready_seconds=float(sys.argv[2]),
        drain_seconds=5,
        requests=requests,
    )
end_if_unread(state.exit_status)
print("failure:", state.failure)
sys.exit(state.exit_status)
