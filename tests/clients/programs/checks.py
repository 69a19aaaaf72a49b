"""Runs the checks of a client's program, and prints for each what it does and how it failed, as JSON."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

URL = os.environ["OPENAI_BASE_URL"]
MODEL = os.environ["MEDHA_MODEL"]

Check = Callable[[], Coroutine[Any, Any, None] | None]


def run(*checks: Check) -> None:
    """Call each check, all coroutines on one event loop; its docstring says what it does."""
    with asyncio.Runner() as runner:
        for check in checks:
            error = None
            try:
                if inspect.iscoroutinefunction(check):
                    runner.run(check())
                else:
                    check()
            except Exception:  # noqa: BLE001 - whatever a check raises is its report
                error = traceback.format_exc()
            print(json.dumps({"check": check.__doc__, "error": error}), flush=True)


def raised(kind: type[Exception], call: Callable[[], object]) -> Any:
    """Return the error of this kind with which a call ends."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} came")
