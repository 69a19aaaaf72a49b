"""The operator as a running program.

Reflectors fill the index, the index queues keys, workers reconcile them. The operator acts while it holds the
lease. Without it the stores are kept up to date, so that the next holder begins at once; when it is lost, the
process ends and a new one begins with a fresh view.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import uuid
from datetime import UTC, datetime
from pathlib import Path

from prometheus_client import make_wsgi_app

import medha
from medha_links.bounded_http import BoundedWsgiServer
from medha_operator.declared import NAME_CONFLICT, Declarations, models_key
from medha_operator.definitions import OPENAPI_PATH, missing_fields
from medha_operator.index import Index
from medha_operator.kube.client import ApiError, Cluster, Fenced
from medha_operator.kube.kinds import DEPLOYMENT, GANGS, NODE, REPLICA, ROUTER, Key, Kind
from medha_operator.kube.lease import Lease, Tenure, write_seconds
from medha_operator.kube.reflector import Reflector
from medha_operator.kube.store import Document
from medha_operator.kube.workqueue import WorkQueue
from medha_operator.operator_metrics import Telemetry
from medha_operator.operator_settings import OperatorSettings
from medha_operator.reconciler import GANG_UNAVAILABLE, Reconciler, is_refusal
from medha_process.host_resources import raise_file_limit

_log = logging.getLogger(__name__)

_REFUSED_SECONDS = 5.0
_DEFINITIONS_SECONDS = 2.0
_SHOWN_FIELDS = 10


def read_settings() -> OperatorSettings:
    """Return the settings of the file that `MEDHA_OPERATOR_SETTINGS` names; without one, the defaults."""
    path = os.environ.get("MEDHA_OPERATOR_SETTINGS")
    return OperatorSettings.model_validate_json(Path(path).read_bytes()) if path else OperatorSettings()


def identity() -> str:
    """Return the name of the lease's holder.

    In a cluster it names this pod, in which one container runs at a time; elsewhere, it names this process.
    """
    pod, namespace = os.environ.get("MEDHA_POD_NAME"), os.environ.get("MEDHA_POD_NAMESPACE", "")
    return f"{namespace}/{pod}" if pod else f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4()}"


class Program:
    """A process of the operator."""

    def __init__(self, settings: OperatorSettings, holder: str) -> None:
        self._settings = settings
        self._holder = holder
        self._tenure = Tenure()
        self._queue = WorkQueue(asyncio.get_running_loop().time)
        self.index = Index(self._queue.add, settings.gang_apis)
        self._telemetry = Telemetry(self.index, self._queue)
        self._declarations = Declarations(self.index, settings)

    def seen(self, document: Document) -> None:
        """Take in an event that kopf has received: a second source of news about our own resources."""
        namespace = document["metadata"]["namespace"]
        if namespace in (self._settings.namespaces or (namespace,)):
            self.index.offer(document)

    async def run(self) -> None:
        """Act until cancelled.

        Raises:
            ExceptionGroup: the lease was lost, or one of the tasks failed; the others were cancelled.
        """
        telemetry = self._telemetry
        raise_file_limit()
        limit = write_seconds(self._settings.lease_seconds)
        cluster = await Cluster.connect(self._tenure.covers, telemetry.wrote, limit)
        try:
            await wait_for_definitions(cluster)
        except BaseException:
            await cluster.close()
            raise
        # The readiness probe asks for metrics: until there are definitions, a rollout keeps the operator before this one.
        server = BoundedWsgiServer("0.0.0.0", self._settings.metrics_port, make_wsgi_app(telemetry.registry))
        server.start("metrics")
        lease = Lease(cluster, self._tenure, self._holder, self._settings)
        reconciler = Reconciler(
            cluster, self.index, self._settings, telemetry, holder=self._holder, now=_unix_seconds
        )
        reflectors = [
            reflector for kind in self.index.watched for reflector in self._reflectors(cluster, kind)
        ]
        try:
            async with asyncio.TaskGroup() as tasks:
                for reflector in reflectors:
                    tasks.create_task(reflector.run())
                for reflector in reflectors:
                    await reflector.is_synced.wait()
                _log.info("all resources are listed; waiting for the lease")
                await lease.acquire()
                # Renew it at once: listing a large cluster may take longer than a lease.
                tasks.create_task(lease.keep())
                # A watch may lag behind what the previous holder has seen and done; a list made now cannot.
                await asyncio.gather(*(reflector.catch_up() for reflector in reflectors))
                telemetry.leads()
                for router in self._settings.routers:
                    self._queue.add(Key(ROUTER.name, router.namespace, router.name))
                    self._queue.add(models_key(router))
                for _ in range(self._settings.concurrent_replicas):
                    tasks.create_task(self._work(reconciler))
                tasks.create_task(self._resync(reconciler))
        finally:
            self._queue.close()
            await lease.release()
            await cluster.close()
            server.shutdown()
            server.server_close()

    def _reflectors(self, cluster: Cluster, kind: Kind) -> list[Reflector]:
        namespaces = (self._settings.namespaces if kind.is_namespaced else ()) or (None,)
        return [
            Reflector(
                cluster,
                kind,
                self.index.stores[kind.name],
                namespace=namespace,
                selector=self.index.watched[kind],
                relist_seconds=self._settings.resync_seconds,
                # An installation for single namespaces may not read nodes; a gang scheduler may not be
                # installed.
                is_optional=kind is NODE or kind in GANGS.values(),
            )
            for namespace in namespaces
        ]

    async def _resync(self, reconciler: Reconciler) -> None:
        """Reconcile everything in intervals, even without events, and forget outdated cached results."""
        while True:
            await asyncio.sleep(self._settings.resync_seconds)
            reconciler.forget()
            for kind in (DEPLOYMENT, REPLICA):
                for key, _ in self.index.resources(kind):
                    self._queue.add(key)

    async def _work(self, reconciler: Reconciler) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            key, waited = await self._queue.take()
            self._telemetry.waited(waited)
            began = clock()
            outcome = await self._reconcile(reconciler, key)
            self._telemetry.reconciled(key.kind, outcome, clock() - began)

    async def _reconcile(self, reconciler: Reconciler, key: Key) -> str:
        """Reconcile a key once, and queue it again as needed; return the outcome as metrics call it."""
        try:
            for concerned in self._declarations.changed(key):
                self._queue.add(concerned)
            result = await reconciler.reconcile(key)
        except ApiError as error:
            pause = self._queue.failed(key, least_pause(error))
            # Somebody was faster: nothing is wrong.
            level = logging.INFO if error.status == 409 else logging.WARNING
            _log.log(level, "%s: %s; the next reconcile is in %g s", key, error, pause)
            reason = error.reason
        except Fenced as error:
            _log.warning("%s: %s", key, error)
            self._queue.failed(key)
            reason = "Fenced"
        except Exception:  # noqa: BLE001 - a mistake of ours with one resource must not stop the others
            _log.exception("%s: the reconcile failed; the next one is in %g s", key, self._queue.failed(key))
            reason = "Bug"
        else:
            self._queue.done(key, makes_progress=result.makes_progress)
            if result.writes:
                self._queue.add(key)  # until there is nothing left to do
            if result.requeue_seconds is not None:
                self._queue.add_later(key, result.requeue_seconds)
            return "changed" if result.writes else "unchanged"
        self._telemetry.failed(key.kind, reason)
        return "failed"


async def wait_for_definitions(cluster: Cluster) -> None:
    """Wait until the API server's definitions have every field of this version; log which they have not."""
    reported: list[str] = []
    while True:
        try:
            missing = missing_fields(await cluster.describe(OPENAPI_PATH))
        except ApiError as error:
            if error.status == 403:
                _log.warning(
                    "the definitions of the API server are not checked, because it does not show them: %s",
                    error,
                )
                return
            _log.warning(
                "the definitions of the API server cannot be read: %s; asking again in %g s",
                error,
                _DEFINITIONS_SECONDS,
            )
            missing = reported
        else:
            if not missing:
                return
            if missing != reported:
                _log.error(
                    "the API server's definitions are older than this operator, which is %s, or missing: they lack %s%s. "
                    "Apply those of this version, by `helm upgrade` or `kubectl apply --server-side -f crds/`. Until then "
                    "nothing is reconciled",
                    medha.__version__, ", ".join(missing[:_SHOWN_FIELDS]), ", ..." * (len(missing) > _SHOWN_FIELDS),
                )  # fmt: skip
            reported = missing
        await asyncio.sleep(_DEFINITIONS_SECONDS)


def _unix_seconds() -> float:
    return datetime.now(UTC).timestamp()


def least_pause(error: ApiError) -> float:
    """Return the shortest pause before a retry.

    It is the one that the API server asks for, or a fixed one after a refusal, which seldom passes soon
    unless the resource changes.
    """
    lasts = is_refusal(error) or error.reason in (NAME_CONFLICT, GANG_UNAVAILABLE)
    return error.retry_after_seconds or (_REFUSED_SECONDS if lasts else 0.0)
