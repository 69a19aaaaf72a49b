"""The page about clients of other projects follows their reports, and shows what a server that ignores a field would hide."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmark import benchmark

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def clients() -> ModuleType:
    return benchmark("clients")


def report(**requests: dict[str, Any]) -> dict[str, Any]:
    chat = {"count": 2, "fields": ["model", "store"], "statuses": {"200": 1, "400": 1}}
    refusal = {"path": "/v1/chat/completions", "status": 400, "param": "store", "code": "a", "message": "No."}
    return {
        "version": "1.2", "install": "pip install one==1.2", "exercised": ["`create`"], "refused": [refusal],
        "requests": {"POST /v1/chat/completions": {**chat, **requests.get("chat", {})}},
    }  # fmt: skip


def test_the_page_is_that_of_the_reports(clients: ModuleType) -> None:
    found = json.loads(clients.RESULTS.read_text())["clients"]
    assert (ROOT / "docs" / "clients.md").read_text() == clients.page(found)


def test_a_row_names_what_was_refused(clients: ModuleType) -> None:
    page = clients.page({"one": report()})
    assert "| [one](#one) | 1.2 | 1 | 2 | `store` |" in page
    assert "| `POST /v1/chat/completions` | `model`, `store` | 1 with 200, 1 with 400 |" in page
    assert "- 400: No." in page


def test_a_field_that_nobody_knows_and_an_error_of_the_server_break_the_claims(clients: ModuleType) -> None:
    holds = benchmark("harness").holds
    assert all(map(holds, clients.claims({"one": report()})))
    for broken in ({"fields": ["model", "frobnicate"]}, {"statuses": {"500": 1}}):
        failed, ignored = map(holds, clients.claims({"one": report(chat=broken)}))
        assert failed is ("fields" in broken)
        assert ignored is ("statuses" in broken)
