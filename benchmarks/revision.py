"""Which state of the code a benchmark measures."""

import subprocess
from pathlib import Path


def revision() -> str:
    """The commit that is measured; `-dirty` behind it where files differ from it, `unknown` without git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
