"""Files of a cluster's keys: programs read them while tests ask for their paths."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

from cluster.keys import ADMIN, Keys


def test_a_kubeconfig_that_a_program_reads_is_never_written_over(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    path = keys.kubeconfig("https://127.0.0.1:1", *ADMIN)
    with path.open() as read:
        assert keys.kubeconfig("https://127.0.0.1:1", *ADMIN) == path
        assert path.stat().st_ino == os.fstat(read.fileno()).st_ino, "nothing was to be changed"
        assert keys.kubeconfig("https://127.0.0.1:2", *ADMIN) == path
        assert json.load(read)["clusters"][0]["cluster"]["server"] == "https://127.0.0.1:1"
    assert json.loads(path.read_text())["clusters"][0]["cluster"]["server"] == "https://127.0.0.1:2"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
