"""Sums up what a client asked of a server: paths, fields, statuses, and what was refused by name."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from .traffic import Exchange


def entry(exchanges: Iterable[Exchange]) -> dict[str, Any]:
    """Return the requests of a client by path, and the refusals, each once."""
    requests: dict[str, dict[str, Any]] = {}
    refused: dict[str, dict[str, Any]] = {}
    agents: Counter[str] = Counter()
    for exchange in exchanges:
        agents[exchange.headers.get("user-agent", "")] += 1
        path = re.sub(r"^/v1/models/.+", "/v1/models/{model}", exchange.path)
        found = requests.setdefault(
            f"{exchange.method} {path}", {"count": 0, "fields": set(), "statuses": Counter()}
        )
        found["count"] += 1
        found["fields"] |= set(exchange.fields)
        found["statuses"][str(exchange.status) if exchange.status else "no answer, as the client left"] += 1
        if exchange.status >= 400:
            error = _error(exchange)
            refused.setdefault(error["message"], {"path": path, "status": exchange.status, **error})
    for found in requests.values():
        found["fields"] = sorted(found["fields"])
        found["statuses"] = dict(sorted(found["statuses"].items()))
    return {
        "user_agents": sorted(agents),
        "requests": dict(sorted(requests.items())),
        "refused": sorted(refused.values(), key=lambda one: (one["path"], one["message"])),
    }


def _error(exchange: Exchange) -> dict[str, Any]:
    try:
        error = json.loads(exchange.answer)["error"]
    except (ValueError, KeyError, TypeError):
        return {"param": None, "code": None, "message": exchange.answer[:200].decode("utf-8", "replace")}
    return {name: error.get(name) for name in ("param", "code", "message")}
