"""Call the API server: each method makes a call and says what the answer means.

Every write except that of the Lease passes `_write`, which the tenure of the lease fences.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import orjson
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import load_incluster_config, load_kube_config

from medha.errors import MedhaError
from medha_operator.kube.kinds import EVENT, KINDS, LEASE, MANAGER, Key, Kind, Manifest

Document = dict[str, Any]

_READ_SECONDS = 30.0
_PAGE = 500
_SILENCE_SECONDS = 90.0
"""Seconds without any data, not even a bookmark, after which a watch is restarted; a server sends a
bookmark every minute."""


class ApiError(MedhaError):
    """The API server refused a call, or did not answer (`status` 0). `reason` is Kubernetes' own."""

    def __init__(
        self, status: int, reason: str, message: str, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(f"{reason} ({status}): {message}")
        self.status = status
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


class Fenced(MedhaError):
    """A write was not sent: the lease ends too soon for it, or is lost."""


class Cluster:
    """A client of one API server.

    `may_write` returns whether a write that takes at most so many seconds may be sent now.
    """

    def __init__(
        self,
        client: ApiClient,
        may_write: Callable[[float], bool],
        count: Callable[[str], None],
        write_seconds: float,
    ) -> None:
        self._client = client
        self._may_write = may_write
        self._count = count
        self._writes: set[asyncio.Task[Document]] = set()
        self._write_seconds = write_seconds

    @classmethod
    async def connect(
        cls, may_write: Callable[[float], bool], count: Callable[[str], None], write_seconds: float
    ) -> Cluster:
        """Connect to the cluster of this pod, or to that of the kubeconfig.

        The kubeconfig is used outside of a pod, or if `KUBECONFIG` is set. `count` is called with the verb of
        every write. A write takes `write_seconds` at most, at the API server and here.
        """
        # No limit: there are as many calls as replicas that are reconciled, and none should wait for a watch.
        configuration = Configuration(connection_pool_maxsize=0)
        if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
            load_incluster_config(configuration)  # type: ignore[no-untyped-call]
        else:
            path = os.environ.get("KUBECONFIG")  # the library itself reads it when it is imported
            await load_kube_config(path, client_configuration=configuration)  # type: ignore[no-untyped-call]
        # `trust_env` would look for a proxy, and read ~/.netrc, at each call.
        configuration.client_session_kwargs = {"trust_env": False, "proxy": proxy_to(configuration)}
        return cls(ApiClient(configuration), may_write, count, write_seconds)

    async def settle(self) -> None:
        """Wait until no write is in flight any more."""
        if self._writes:
            await asyncio.wait(self._writes)

    async def close(self) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]

    # --- reading ----------------------------------------------------------------------------------------

    async def get(self, kind: Kind, namespace: str, name: str) -> Document | None:
        """Return an object, or None if there is none."""
        return await self._found(kind.path(namespace, name))

    async def describe(self, path: str) -> Document:
        """Return the API server's description of a group of resources; an empty one if it does not know the group."""
        return await self._found(path) or {}

    async def _found(self, path: str) -> Document | None:
        try:
            return await self._call("GET", path, seconds=_READ_SECONDS)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list(
        self, kind: Kind, namespace: str | None, selector: str, fields: str = ""
    ) -> list[Document]:
        """Return all objects that match, as of now. If there are many, `pages` takes less memory."""
        pages = self.pages(kind, namespace, selector, fields)
        return [item async for items, _ in pages for item in items]

    async def pages(
        self, kind: Kind, namespace: str | None, selector: str, fields: str = ""
    ) -> AsyncIterator[tuple[Iterable[Document], str]]:
        """Yield the objects that match, as of now, page by page, each page with the version of the list.

        `selector` is a label selector, `fields` a field selector. The next page is requested once the caller
        asks for it, and all pages show the state of the first one.

        Raises:
            ApiError: a page was refused, e.g. with 410 when the first one is too old by now.
        """
        head = {"apiVersion": kind.api_version, "kind": kind.name}  # lists omit them
        query = {"labelSelector": selector, "limit": str(_PAGE)} | (
            {"fieldSelector": fields} if fields else {}
        )
        while True:
            page = await self._call("GET", kind.path(namespace), query=query, seconds=_READ_SECONDS)
            metadata = page["metadata"]
            yield (head | item for item in page.pop("items") or []), metadata["resourceVersion"]
            if not metadata.get("continue"):
                return
            query |= {"continue": metadata["continue"]}

    async def watch(
        self, kind: Kind, namespace: str | None, selector: str, version: str, seconds: float
    ) -> AsyncIterator[tuple[str, Document]]:
        """Yield events after `version`, bookmarks included, until the server ends the watch.

        It does so after about `seconds`.

        Raises:
            ApiError: the watch was refused or ended with an error, e.g. 410 when `version` is too old.
        """
        query = {
            "watch": "1",
            "labelSelector": selector,
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, int(seconds))),
        }
        timeout = aiohttp.ClientTimeout(sock_connect=_READ_SECONDS, sock_read=_SILENCE_SECONDS)
        try:
            async with await self._request("GET", kind.path(namespace), None, query, timeout) as response:
                if response.status != 200:
                    raise _refusal(response, await response.read())
                async for line in _lines(response.content):
                    event = orjson.loads(line)
                    if event["type"] == "ERROR":
                        raise _error_of(event["object"])
                    yield event["type"], event["object"]
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _no_answer(error) from error

    # --- writing ----------------------------------------------------------------------------------------

    async def apply(self, manifest: Manifest, version: str | None = None) -> Document:
        """Apply an object, server-side; with `version`, only if it still has that resourceVersion.

        Without `version`, no field is taken over from others: if they own a field of `manifest`, that is a
        conflict (409).
        """
        metadata = manifest["metadata"]
        if version is not None:
            manifest = manifest | {"metadata": metadata | {"resourceVersion": version}}
        path = KINDS[manifest["kind"]].path(metadata["namespace"], metadata["name"])
        query = {"force": "true" if version is not None else "false"}
        return await self._write("PATCH", path, manifest, query, "application/apply-patch+yaml")

    async def patch(self, key: Key, patch: Mapping[str, Any], uid: str, version: str) -> Document:
        """Merge `patch` into the object if it is still the one with this UID and resourceVersion."""
        return await self.merge(key, {**patch, "metadata": {"uid": uid, "resourceVersion": version}})

    async def create(self, manifest: Manifest) -> Document | None:
        """Create an object that is never written again; return None if an object of its name exists."""
        try:
            collection = KINDS[manifest["kind"]].path(manifest["metadata"]["namespace"])
            return await self._write("POST", collection, manifest)
        except ApiError as error:
            if error.reason == "AlreadyExists":  # unlike a conflict over a quota, which is a 409, too
                return None
            raise

    async def delete(self, key: Key, uid: str, version: str, *, is_forced: bool = False) -> bool:
        """Delete the object if it still has this UID and resourceVersion; return whether it existed."""
        options: Document = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid, "resourceVersion": version},
            "propagationPolicy": "Background",
        }
        if is_forced:
            options["gracePeriodSeconds"] = 0
        try:
            await self._write("DELETE", KINDS[key.kind].path(key.namespace, key.name), options)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def write_status(self, key: Key, metadata: Document, status: Document) -> Document:
        """Replace the status of one of our resources if it is still as its `metadata` says.

        All of the metadata is sent back: if a status update omits labels or annotations, the API server takes
        their ownership away from their managers, who could then never again remove them by omitting them from
        a manifest.
        """
        kind = KINDS[key.kind]
        kept = {name: value for name, value in metadata.items() if name != "managedFields"}
        document = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": kept, "status": status}
        return await self._write("PUT", kind.path(key.namespace, key.name, "status"), document)

    async def record_event(
        self, about: Mapping[str, Any], reason: str, message: str, *, is_warning: bool, holder: str
    ) -> None:
        """Emit an event about a resource; the same text again increments the count of the existing event."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        metadata = about["metadata"]
        words = f"{metadata['uid']} {reason} {message}"
        event: Document = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{metadata['name'][:200]}.{hashlib.sha256(words.encode()).hexdigest()[:16]}",
                "namespace": metadata["namespace"],
            },
            "involvedObject": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "type": "Warning" if is_warning else "Normal",
            "reason": reason,
            "message": message[:1024],
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
            "reportingInstance": holder,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        if await self.create(event) is None:
            name = event["metadata"]["name"]
            found = await self.get(EVENT, metadata["namespace"], name)
            again = {"count": int((found or {}).get("count") or 0) + 1, "lastTimestamp": now}
            await self.merge(Key(EVENT.name, metadata["namespace"], name), again)

    async def merge(self, key: Key, patch: Document) -> Document:
        """Change the fields of an object that `patch` names; a field that is None is removed."""
        path = KINDS[key.kind].path(key.namespace, key.name)
        return await self._write("PATCH", path, patch, content_type="application/merge-patch+json")

    async def write_lease(self, document: Document, *, is_new: bool) -> Document:
        """Create or replace the Lease. It is the only unfenced write: it fences the others."""
        metadata = document["metadata"]
        path = LEASE.path(metadata["namespace"], "" if is_new else metadata["name"])
        return await self._call(
            "POST" if is_new else "PUT",
            path,
            document,
            {"fieldManager": MANAGER},
            seconds=self._write_seconds,
        )

    # --- one call ---------------------------------------------------------------------------------------

    async def _write(
        self,
        method: str,
        path: str,
        body: Document,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Document:
        if not self._may_write(self._write_seconds):
            raise Fenced(
                f"{method} {path} was not sent: this process does not hold the lease for long enough"
            )
        self._count(method)
        # The server's timeout is the same as ours: no write of ours takes effect after the lease.
        query = {**(query or {}), "timeout": f"{self._write_seconds:.3f}s"}
        if method != "DELETE":
            query["fieldManager"] = MANAGER
        call = self._call(method, path, body, query, content_type, seconds=self._write_seconds)
        sent = asyncio.create_task(call)
        self._writes.add(sent)
        sent.add_done_callback(self._writes.discard)
        return await asyncio.shield(sent)  # so that a write that was sent is not cancelled with its caller

    async def _call(
        self,
        method: str,
        path: str,
        body: Document | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        *,
        seconds: float,
    ) -> Document:
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with await self._request(
                method, path, body, query or {}, timeout, content_type
            ) as response:
                answer = await response.read()
                if response.status >= 300:
                    raise _refusal(response, answer)
                document: Document = orjson.loads(answer)
                return document
        except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
            raise _no_answer(error) from error

    async def _request(
        self,
        method: str,
        path: str,
        body: Document | None,
        query: Mapping[str, str],
        limit: aiohttp.ClientTimeout,
        content_type: str = "application/json",
    ) -> aiohttp.ClientResponse:
        """Send a request and return the response, whose body is yet to be read.

        The package's client sends, authenticates (with the present token: the kubelet renews that of a pod) and
        knows proxies and certificates. Its models are not used: see docs/operator.md.
        """
        _, url, headers, *_ = await self._client.param_serialize(
            method,
            path,
            query_params=[*query.items()],
            header_params={"Accept": "application/json", "Content-Type": content_type},
            auth_settings=["BearerToken"],
        )
        sent = await self._client.call_api(method, url, headers, body, _request_timeout=limit)
        response: aiohttp.ClientResponse = sent.response
        return response


def proxy_to(configuration: Configuration) -> str | None:
    """Return the proxy before the API server, from the kubeconfig or else the environment; None if none."""
    address = urlsplit(configuration.host)
    if configuration.proxy or proxy_bypass(address.netloc):
        return configuration.proxy
    return getproxies().get(address.scheme)


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield lines of any length; aiohttp's own reader refuses long ones."""
    rest = b""
    async for piece in stream.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line:
                yield line


def _refusal(response: aiohttp.ClientResponse, body: bytes) -> ApiError:
    try:
        status = orjson.loads(body)
    except ValueError:
        status = {}
    if not isinstance(status, dict):
        status = {}
    after = response.headers.get("Retry-After", "")
    message = status.get("message") or body[:300].decode(errors="replace")
    reason = status.get("reason") or response.reason or "Error"
    return ApiError(response.status, reason, message, float(after) if after.isdigit() else None)


def _error_of(status: Document) -> ApiError:
    return ApiError(int(status.get("code", 500)), status.get("reason", "Error"), status.get("message", ""))


def _no_answer(error: Exception) -> ApiError:
    return ApiError(0, "NoAnswer", f"{type(error).__name__}: {error}")
