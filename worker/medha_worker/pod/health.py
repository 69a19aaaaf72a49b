"""HTTP server for the kubelet's probes `/started`, `/ready` and `/live`: 200 or 503, with reasons as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from medha.errors import ConfigInvalid
from medha_links.bounded_http import BoundedHandler, BoundedServer
from medha_worker.pod.pod_watch import Answer, PodWatch


class HealthServer:
    """Answers probes in its own threads, from the state that the supervisor's thread keeps up to date."""

    def __init__(self, watch: PodWatch, host: str, port: int) -> None:
        """Listen on `host` and `port`.

        Raises:
            ConfigInvalid: the server cannot listen there.
        """
        answers: dict[str, Callable[[], Answer]] = {
            "/started": watch.started,
            "/ready": watch.ready,
            "/live": lambda: watch.live(time.monotonic()),
        }

        class Handler(BoundedHandler):
            def do_GET(self) -> None:  # noqa: N802 (http.server's name)
                ask = answers.get(self.path.partition("?")[0])
                if ask is None:
                    self._send(404, {"error": f"{self.path[:80]!r} is not here: {', '.join(answers)}"})
                    return
                answer = ask()
                self._send(200 if answer.ok else 503, answer.document(dict(watch.states)))

            def _send(self, status: int, document: dict[str, Any]) -> None:
                body = json.dumps(document).encode() + b"\n"
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        try:
            self._server = BoundedServer(host, port, Handler)
        except OSError as error:
            raise ConfigInvalid(
                f"health: cannot listen on {host} port {port}: {error.strerror}; another pod has this address"
            ) from error
        self._server.start("health")

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
