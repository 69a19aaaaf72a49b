"""Why the operator does not watch by kopf (docs/operator.md). Once this fails, look at that again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from campaign.proxy import Call, Fault, FaultyProxy
from cluster.api import Api, eventually
from cluster.control_plane import ControlPlane
from medha_operator.kube.kinds import CONFIG_MAP

_GONE = {
    "type": "ERROR",
    "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"},
}


class DeletedTooLongAgo(Fault):
    """Answers a deletion as a watch that was interrupted for too long finds it: not at all, but by a 410."""

    async def notice(self, call: Call, event: bytes) -> list[bytes]:
        if not call.path.endswith("/configmaps") or b'"DELETED"' not in event:
            return [event]
        self.times += 1
        return [json.dumps(_GONE).encode() + b"\n"]


@contextmanager
def kopf(log: Path, kubeconfig: Path) -> Iterator[None]:
    """Run the operator of `kopf_index.py`."""
    program = Path(__file__).with_name("kopf_index.py")
    environment = os.environ | {"KUBECONFIG": str(kubeconfig)}
    command = ["setpriv", "--pdeathsig", "KILL", "--", sys.executable, "-m", "kopf", "run", "--standalone"]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [*command, "--all-namespaces", str(program)], stdout=output, stderr=output, env=environment
        ) as process,
    ):
        try:
            yield
        finally:
            process.kill()


def test_kopf_keeps_what_was_deleted_while_a_watch_was_interrupted_for_too_long(
    plane: ControlPlane, tmp_path: Path
) -> None:
    log = tmp_path / "kopf.log"

    def make(api: Api, name: str) -> None:
        api.call(
            "POST", CONFIG_MAP.path("default"), {"metadata": {"name": name, "labels": {"watched-by": "kopf"}}}
        )

    def lines() -> list[str]:
        return log.read_text(encoding="utf-8").splitlines()

    with Api(plane) as api, FaultyProxy(plane) as proxy:
        proxy.begin(fault := DeletedTooLongAgo())
        make(api, "stays")
        make(api, "goes")
        with kopf(log, proxy.kubeconfig(tmp_path)):
            eventually(lambda: "goes: goes stays" in lines())
            api.call("DELETE", CONFIG_MAP.path("default", "goes"))
            eventually(lambda: sum(line.startswith("stays: ") for line in lines()) == 2)  # by the second list
            make(api, "new")
            eventually(lambda: "new: goes new stays" in lines())  # an index that is right has `new stays`
    assert fault.times == 1
