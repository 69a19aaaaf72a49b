"""The init container that fetches a model of the Hub: its command, as rendered, against a Hub of our own."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from medha.api.replica import MedhaReplicaSpec
from medha_operator.kube.kinds import Manifest
from medha_operator.operator_settings import OperatorSettings
from medha_operator.replica.manifests import Owner, pod_templates

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    name: name.encode() * 9
    for name in ("config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin", "original/a.pth")
}
TOKEN = "hf_of_a_secret"


class Hub:
    """Says what is in one repository, and gives its files to who has the token."""

    def __init__(self) -> None:
        self.asked: set[str] = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._answer(with_body=False)

            def do_GET(self) -> None:
                self._answer(with_body=True)

            def _answer(self, *, with_body: bool) -> None:
                path = self.path.partition("?")[0]
                resolved = f"/team/model/resolve/{COMMIT}/"
                if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    self.send_error(401)
                elif path == "/api/models/team/model/revision/v2":
                    siblings = [{"rfilename": name} for name in FILES]
                    self._send(json.dumps({"id": "team/model", "sha": COMMIT, "siblings": siblings}).encode())
                elif path == f"/api/models/team/model/tree/{COMMIT}":
                    tree = [
                        {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                        for name, content in FILES.items()
                    ]
                    self._send(json.dumps(tree).encode())
                elif path.startswith(resolved) and path.removeprefix(resolved) in FILES:
                    name = path.removeprefix(resolved)
                    hub.asked.add(name)
                    self._send(FILES[name], with_body=with_body)
                else:
                    self.send_error(404)

            def _send(self, content: bytes, *, with_body: bool = True) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
                self.send_header("X-Repo-Commit", COMMIT)
                self.end_headers()
                if with_body:
                    self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    found = Hub()
    yield found
    found.close()


def fetching(revision: str) -> Manifest:
    """The init container of a replica's pods."""
    source = {
        "huggingFace": {
            "repository": "team/model",
            "revision": revision,
            "tokenSecret": {"name": "hub", "key": "token"},
        }
    }
    spec = MedhaReplicaSpec.model_validate({"model": {"name": "m", "source": source}})
    (template,) = pod_templates(Owner("m", "tests", "uid"), spec, "r", OperatorSettings())
    (container,) = template["spec"]["initContainers"]
    return dict(container)


def run(container: Manifest, hub: Hub, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a container's command with its mounts below `folder` and nothing else of this user's."""
    mounts = {mount["mountPath"]: folder / mount["name"] for mount in container["volumeMounts"]}
    for path in mounts.values():
        path.mkdir(exist_ok=True)

    def placed(word: str) -> str:
        for mounted, path in mounts.items():
            if word == mounted or word.startswith(mounted + "/"):
                return str(path) + word.removeprefix(mounted)
        return word

    environment = {entry["name"]: placed(entry["value"]) for entry in container["env"] if "value" in entry}
    if "HF_TOKEN_PATH" in environment:
        Path(environment["HF_TOKEN_PATH"]).write_text(TOKEN + "\n")
    else:
        environment["HF_TOKEN"] = TOKEN
    bin_folder = str(Path(sys.executable).parent)
    return subprocess.run(
        [placed(word) for word in (*container["command"], *container["args"])],
        env={"PATH": f"{bin_folder}{os.pathsep}/usr/bin", "HOME": "/nonexistent", "HF_ENDPOINT": hub.url}
        | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_pod_fetches_what_its_ranks_read_and_no_other_weights(hub: Hub, tmp_path: Path) -> None:
    done = run(fetching("v2"), hub, tmp_path)
    assert done.returncode == 0, done.stderr
    pending = {"config.json", "tokenizer.json", "model.safetensors"}
    assert hub.asked == pending
    for name in pending:
        assert (tmp_path / "model" / name).read_bytes() == FILES[name]


def test_a_revision_that_is_not_there_ends_the_init_container_with_words(hub: Hub, tmp_path: Path) -> None:
    done = run(fetching("v3"), hub, tmp_path)
    assert done.returncode != 0
    assert "v3" in done.stderr or "team/model" in done.stderr, "what the kubelet shows of its log"
