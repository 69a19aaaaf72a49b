"""Handlers that kopf runs: they start and end the program, and pass on events about our resources.

Nothing here makes kopf write to a resource: no handler of creation, update or deletion, no timer, no daemon.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Mapping
from typing import Any

import kopf

from medha_operator.kopf_storage import NoDifferences, NoProgress
from medha_operator.kube.kinds import DEPLOYMENT, REPLICA
from medha_operator.program import Program, identity, read_settings

_OBJECTS_BETWEEN_SEARCHES = 20_000
_log = logging.getLogger(__name__)


@kopf.on.startup(errors=kopf.ErrorsMode.PERMANENT)
async def start(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # it logs every event
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)  # it logs every probe
    # Let the garbage collector search for cycles less often than by default (every 700 new objects). A search visits all
    # known documents, and each document that is read creates hundreds of objects: searches took up to a tenth of the CPU.
    gc.freeze()
    gc.set_threshold(_OBJECTS_BETWEEN_SEARCHES, 10, 10)
    settings.persistence.diffbase_storage = NoDifferences()
    settings.persistence.progress_storage = NoProgress()
    settings.posting.enabled = False
    settings.scanning.disabled = True  # it would need the right to list every definition and namespace
    settings.queueing.idle_timeout = 0.1  # one worker a resource, which has little to do
    settings.networking.request_timeout = 30
    settings.watching.server_timeout = 270
    settings.watching.chunk_size = 500  # it would hold a whole list
    program = Program(read_settings(), identity())
    memo.program = program
    memo.task = asyncio.create_task(_run(program))


@kopf.on.event(REPLICA.plural, group=REPLICA.group)
@kopf.on.event(DEPLOYMENT.plural, group=DEPLOYMENT.group)
async def on_event(event: Mapping[str, Any], memo: kopf.Memo, **_: Any) -> None:
    if event["type"] != "DELETED":
        memo.program.seen(event["object"])


@kopf.on.cleanup()
async def end(memo: kopf.Memo, **_: Any) -> None:
    memo.task.cancel()
    await asyncio.gather(memo.task, return_exceptions=True)


async def _run(program: Program) -> None:
    """Run until the lease is lost or something breaks; then end the process, to be restarted from outside."""
    try:
        await program.run()
    except Exception:  # noqa: BLE001 - logged with its trace
        _log.exception("the operator ends")
    os.kill(os.getpid(), signal.SIGTERM)  # kopf then shuts down in order
