"""The page `/ui` of a real `medha up` in a real browser: short requests pass long prompts, and one sees it.

With MEDHA_PICTURES=FOLDER in the environment, pictures of the page are kept there, to be looked at.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from browser import Browser, browser, needs_browser

from .conftest import MODEL, Served

pytestmark = [pytest.mark.long, pytest.mark.timeout(300), needs_browser]

WIDTHS = {"narrow": (400, 850), "wide": (1600, 1000)}
LONG_WORDS = (6_000, 9_000)
SHORT_CLIENTS = 3


@contextmanager
def load(served: Served) -> Iterator[None]:
    """Keep long prompts, and clients with short ones beside them, open for as long as the block lasts."""
    ended = threading.Event()

    def ask_on(number: int, words: int, tokens: int) -> None:
        turn = 0
        while not ended.is_set():
            turn += 1
            body = {
                "model": MODEL,
                "prompt": f"{number} {turn}: " + "word " * words,
                "max_tokens": tokens,
                "ignore_eos": True,
                "stream": True,
            }
            with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=120) as answer:
                for _ in answer.iter_lines():
                    if ended.is_set():
                        return

    with ThreadPoolExecutor(SHORT_CLIENTS + len(LONG_WORDS)) as pool:
        asked = [pool.submit(ask_on, number, words, 40) for number, words in enumerate(LONG_WORDS)]
        asked += [pool.submit(ask_on, 10 + number, 20 + 60 * number, 60) for number in range(SHORT_CLIENTS)]
        try:
            yield
        finally:
            ended.set()
            for one in asked:
                one.result()


@pytest.fixture
def page(served: Served, tmp_path: Path) -> Iterator[Browser]:
    with browser(tmp_path) as found:
        found.show(1600, 1000)
        found.open(f"http://{served.address('requests')}/ui")
        found.until("document.getElementById('status').dataset.state === 'live'")
        yield found
        assert found.problems == []


def test_short_requests_pass_long_prompts_on_the_page_of_a_real_replica(
    served: Served, page: Browser, tmp_path: Path
) -> None:
    with load(served):
        page.until(
            "document.getElementById('convoy').innerText.match(/, \\d{2,} short requests got theirs/)", 90
        )
        folder = Path(os.environ.get("MEDHA_PICTURES", tmp_path))
        for name, (width, height) in WIDTHS.items():
            for shade in ("light", "dark"):
                page.show(width, height, dark=shade == "dark")
                page.until(f"innerWidth === {width}")
                page.evaluate("new Promise(requestAnimationFrame)")
                assert page.evaluate("document.documentElement.scrollWidth") == width
                (folder / f"{name}-{shade}.png").write_bytes(page.screenshot())
    served.wait_idle(90)
