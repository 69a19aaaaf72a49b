"""A real Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import websocket

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
IN_CI = bool(os.environ.get("CI"))  # where a test fails without one
needs_browser = pytest.mark.skipif(
    CHROMIUM is None and not IN_CI, reason="no chromium: apt-get install chromium"
)
ANSWER_SECONDS = 60.0


class Browser:
    """A page of a running Chromium."""

    def __init__(self, address: str) -> None:
        self._socket = websocket.create_connection(address, timeout=ANSWER_SECONDS, suppress_origin=True)
        self._calls = 0
        self.problems: list[str] = []
        """Exceptions, errors of the console and the log, violations of the page's policy among them."""
        for domain in ("Page", "Runtime", "Log", "DOM"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        self._calls += 1
        self._socket.send(json.dumps({"id": self._calls, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._calls:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            self._note(message.get("method"), message.get("params", {}))

    def _note(self, event: str | None, details: dict[str, Any]) -> None:
        match event:
            case "Runtime.exceptionThrown":
                thrown = details["exceptionDetails"]
                self.problems.append(thrown.get("exception", {}).get("description") or thrown["text"])
            case "Runtime.consoleAPICalled" if details["type"] in ("error", "assert"):
                self.problems.append(str([one.get("value") for one in details["args"]]))
            case "Log.entryAdded" if details["entry"]["level"] == "error":
                self.problems.append(details["entry"]["text"])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page; of a promise, once it is settled."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str, within_seconds: float = 30.0) -> Any:
        """Wait until an expression is true in the page, and return its value."""
        deadline = time.monotonic() + within_seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, (
                f"not within {within_seconds:g} s: {expression}; {self.problems}"
            )
            time.sleep(0.05)
        return value

    def show(self, width: int, height: int, *, dark: bool = False, calm: bool = False) -> None:
        """Set the size of the page and what its user prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if calm else "no-preference"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def press(self, key: str) -> None:
        text = {"Space": " "}.get(key, key if len(key) == 1 else "")
        name = {"Space": " "}.get(key, key)
        for kind in ("keyDown", "keyUp"):
            given = {"text": text} if text and kind == "keyDown" else {}
            code = {"Tab": 9, "Enter": 13}.get(key, 0)
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=name, code=key, windowsVirtualKeyCode=code, **given
            )

    def choose_file(self, selector: str, path: Path) -> None:
        """Give a file to an input."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def screenshot(self, *, whole: bool = True) -> bytes:
        """Return a PNG of the page."""
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(picture["data"])

    def close(self) -> None:
        self._socket.close()


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start Chromium with a new profile in an empty directory, and end it."""
    assert CHROMIUM is not None, "no chromium: apt-get install chromium"
    command = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        "about:blank",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port_file = profile / "DevToolsActivePort"
        deadline = time.monotonic() + ANSWER_SECONDS
        while not (port_file.exists() and port_file.read_text().strip()):
            assert process.poll() is None and time.monotonic() < deadline, "chromium does not start"  # noqa: PT018
            time.sleep(0.05)
        port = port_file.read_text().split()[0]
        while True:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=10) as answer:
                pages = [one for one in json.load(answer) if one["type"] == "page"]
            if pages:
                break
            time.sleep(0.05)
        page = Browser(pages[0]["webSocketDebuggerUrl"])
        try:
            yield page
        finally:
            page.close()
    finally:
        process.terminate()
        process.wait(20)
