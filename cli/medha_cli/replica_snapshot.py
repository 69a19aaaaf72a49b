"""Snapshots of a running replica: its controller's status and its router's counters. Read-only, over HTTP."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from medha.errors import ConfigInvalid, PartFailed
from medha.scheduler.status_report import Order, ReplicaStatus
from medha_cli.runs import Run, find

ANSWER_SECONDS = 5.0


class RouterStatus(BaseModel):
    """The counters of a router, over all replicas that it knows."""

    model_config = ConfigDict(frozen=True)

    requests_open: int
    sequences_waiting: int
    """Sequences that wait there for a replica with room."""
    ttft_met: int
    """Requests whose first token reached the router within its target, since the router began."""
    ttft_missed: int
    tpot_met: int
    tpot_missed: int


class Snapshot(BaseModel):
    """A snapshot of a replica."""

    model_config = ConfigDict(frozen=True)

    status: ReplicaStatus
    router: RouterStatus | None
    """None if no router is known, or it does not answer."""


class NotAnswering(PartFailed):
    """The replica does not answer now; a later poll may succeed."""


class Target:
    """The polled replica: a run on this machine, or the address of a controller."""

    def __init__(self, name: str | None, run_directory: Path | None, url: str | None) -> None:
        """Find the replica.

        Raises:
            ConfigInvalid: more than one argument is given, the address is invalid, or there is no run or more than one.
        """
        if sum(given is not None for given in (name, run_directory, url)) > 1:
            raise ConfigInvalid("a name, --run-dir and --url each select a replica; give one of them")
        self._url = None if url is None else _base(url)
        self._run: Run | None = None if url is not None else find(name, run_directory)

    @property
    def name(self) -> str:
        return self._run.name if self._run is not None else str(self._url)

    def controller_url(self) -> str:
        """Return the address of the replica's controller.

        Raises:
            NotAnswering: the replica is still starting.
            PartFailed: it has ended.
        """
        if self._run is None:
            return str(self._url)
        url = self._run.telemetry_url()
        if url is not None:
            return url
        if not self._run.lasts():
            raise PartFailed(f"{self._run.name} has ended")
        raise NotAnswering(f"{self._run.name} is starting: not all of its ranks have been ready yet")

    def snapshot(self, order: Order, most_requests: int) -> Snapshot:
        """Poll the replica once.

        Raises:
            NotAnswering: the controller does not answer now.
            PartFailed: the replica has ended, or the answer is not a controller's.
        """
        url = f"{self.controller_url()}/status?order={order}&requests={most_requests}"
        try:
            body = fetch(url)
        except OSError as error:
            if self._run is not None and not self._run.lasts():
                raise PartFailed(f"{self._run.name} has ended") from error
            raise NotAnswering(f"{url.partition('?')[0]} does not answer: {reason(error)}") from error
        try:
            status = ReplicaStatus.model_validate_json(body)
        except ValidationError as error:
            raise PartFailed(
                f"the server at {url.partition('?')[0]} is not a controller of this version of medha: "
                f"{error.errors()[0]['msg']}; give the address under which it serves its metrics"
            ) from error
        return Snapshot(status=status, router=self._router())

    def _router(self) -> RouterStatus | None:
        url = self._run.router_metrics_url() if self._run is not None else None
        if url is None:
            return None
        try:
            return router_status(fetch(url).decode())
        except (OSError, ImportError, ValueError):
            return None


def fetch(url: str) -> bytes:
    """Return the content of a page.

    Raises:
        OSError: nobody answers, or the answer is an error or incomplete.
    """
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as answer:  # noqa: S310 (http, as `_base` has seen)
            return bytes(answer.read())
    except http.client.HTTPException as error:
        raise OSError(f"the answer breaks off: {error!r}") from error


def reason(error: OSError) -> str:
    """Return why there was no answer, in the server's own words if it gave a reason."""
    if isinstance(error, urllib.error.HTTPError):
        try:
            return str(json.loads(error.read())["error"])
        except (OSError, ValueError, KeyError, TypeError):
            return f"status {error.code}"
    inner = getattr(error, "reason", error)
    return str(getattr(inner, "strerror", None) or inner)


def router_status(metrics: str) -> RouterStatus:
    """Parse the text of a router's `/metrics`.

    Raises:
        ImportError: `medha[router]` is not installed here.
        ValueError: the text is not in that format.
    """
    from prometheus_client.parser import text_string_to_metric_families

    totals = Counter[str]()
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            met = f" {sample.labels['met']}" if "met" in sample.labels else ""
            totals[sample.name + met] += sample.value  # type: ignore[assignment]
    return RouterStatus(
        requests_open=int(totals["medha_router_requests_open"]),
        sequences_waiting=int(totals["medha_router_sequences_waiting"]),
        ttft_met=int(totals["medha_request_ttft_attainment_total true"]),
        ttft_missed=int(totals["medha_request_ttft_attainment_total false"]),
        tpot_met=int(totals["medha_request_tpot_attainment_total true"]),
        tpot_missed=int(totals["medha_request_tpot_attainment_total false"]),
    )


def _base(url: str) -> str:
    """Return an address without the page.

    Raises:
        ConfigInvalid: it is not an HTTP address.
    """
    parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigInvalid(f"--url is {url!r}; give the controller's address, such as http://127.0.0.1:9400")
    return f"{parts.scheme}://{parts.netloc}"
