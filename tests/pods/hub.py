"""A Hub of one repository on this machine, in the words of the real one that fetching needs."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

REPOSITORY = "team/model"
TOKEN = "hf_of_a_secret"


class Hub:
    """Says what is in its repository, and gives the files to who has the token. Large files are known by SHA-256."""

    def __init__(self, files: dict[str, bytes], commit: str) -> None:
        self.files, self.commit = files, commit
        self.asked: list[str] = []
        """Names of the files that were given, in order."""
        self.calls = 0
        self.damages: Counter[str] = Counter()
        """How often each file will be damaged on the way."""
        self.sizes: dict[str, int] = {}
        """Sizes that the Hub states wrongly."""
        self.paused: dict[str, Event] = {}
        """Files that are given only when the event is set."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub._answer(self, with_body=False)

            def do_GET(self) -> None:
                hub._answer(self, with_body=True)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler, *, with_body: bool) -> None:
        path, api = request.path.partition("?")[0], f"/api/models/{REPOSITORY}/"
        self.calls += 1
        resolved = f"/{REPOSITORY}/resolve/{self.commit}/"
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            request.send_error(401)
        elif path in {f"{api}revision/{name}" for name in ("v2", self.commit)}:
            siblings = [self._sibling(name, content) for name, content in self.files.items()]
            self._send(request, _json({"id": REPOSITORY, "sha": self.commit, "siblings": siblings}))
        elif path == f"{api}tree/{self.commit}":
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": _blob(content)}
                for name, content in self.files.items()
            ]
            self._send(request, _json(tree))
        elif path.startswith(resolved) and path.removeprefix(resolved) in self.files:
            name = path.removeprefix(resolved)
            content, sent = self.files[name], self.files[name]
            if with_body:
                self.asked.append(name)
                if name in self.paused:
                    self.paused[name].wait(60)
                if self.damages[name] > 0:
                    self.damages[name] -= 1
                    sent = content[::-1]
            self._send(request, sent, etag=_etag(name, content), with_body=with_body)
        else:
            request.send_error(404)

    def _sibling(self, name: str, content: bytes) -> dict[str, Any]:
        size = self.sizes.get(name, len(content))
        said: dict[str, Any] = {"rfilename": name, "size": size, "blobId": _blob(content)}
        if _is_large(name):
            said["lfs"] = {"sha256": _etag(name, content), "size": size, "pointerSize": 9}
        return said

    def _send(
        self, request: BaseHTTPRequestHandler, content: bytes, *, etag: str = "", with_body: bool = True
    ) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(content)))
        request.send_header("ETag", f'"{etag}"')
        request.send_header("X-Repo-Commit", self.commit)
        request.end_headers()
        if with_body:
            request.wfile.write(content)


def _is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".pth"))


def _blob(content: bytes) -> str:
    """git's name of a content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _etag(name: str, content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if _is_large(name) else _blob(content)


def _json(document: object) -> bytes:
    return json.dumps(document).encode()
