"""Settings of a router."""

from __future__ import annotations

import os
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from medha.api.fields import ENDPOINT_PATTERN
from medha.wire.messages import HEARTBEAT_SECONDS
from medha_process.part_settings import PartSettings

_SMALL_SHARE = 8
"""Small bodies have one of this many equal parts of the budget for bodies to themselves."""
_OTHERS_SHARE = 4
"""Number of equal parts of a budget; one owner may take all but one of them."""


def large_body_budget(budget_bytes: int) -> int:
    """Return the bytes that large bodies may take of the budget for all bodies."""
    return budget_bytes - budget_bytes // _SMALL_SHARE


def owner_body_budget(budget_bytes: int) -> int:
    """Return the bytes that the bodies of one owner (API key or address) may take of a budget."""
    return budget_bytes - budget_bytes // _OTHERS_SHARE


def _network(given: object) -> IPv4Network | IPv6Network:
    try:
        network = ip_network(str(given), strict=False)
    except ValueError:
        raise ValueError(f"{given!r} is no network; give an address or a range such as 10.0.0.0/8") from None
    if network.prefixlen == 0:
        raise ValueError(
            f"{given} is every address, so that each client could choose whose requests its own count as; give the "
            "addresses of your proxies"
        )
    return network


ProxyNetwork = Annotated[IPv4Network | IPv6Network, BeforeValidator(_network)]
"""Addresses of proxies; a single address is a network, too."""


class RouterSettings(PartSettings):
    """Settings of a router: `python -m medha_router`. Endpoints and ports may be left to the system (`*`, 0)."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    metrics_host: str = "127.0.0.1"
    """Address of `/metrics`, and of a second `/health` and `/ready`, which clients do not share."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    control_endpoint: str = "tcp://127.0.0.1:*"
    """ZeroMQ ROUTER that replica controllers connect their control DEALER to."""
    tokens_endpoint: str = "tcp://127.0.0.1:*"
    """ZeroMQ ROUTER that replica controllers connect their token DEALER to."""
    key_file: Path
    """File with the router's secret key; replicas know the public half (docs/security.md)."""
    enrolment_file: Path
    """File with enrolment tokens, one per line; a replica that holds one of them is admitted."""
    ready_file: str | None = None
    """File that is written as JSON {"url", "metrics_url", "control", "tokens"} once everything is bound; the
    same line is logged."""
    scratch_directory: str | None = None
    """Directory that keeps replicas' tokenizers for the tokenising processes; default: the system's
    temporary folder. Removing it after the router's end also removes what a killed router leaves."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in `Host` headers by which the router may be called, in addition to localhost and loopback
    addresses. If empty, all names are allowed, unless the router listens on a loopback address."""
    allowed_origins: tuple[str, ...] = ()
    """Origins (`https://chat.example`, or `*` for all) whose web pages may call the router."""
    trusted_proxies: tuple[ProxyNetwork, ...] = ()
    """Addresses of the proxies and gateways in front of the router. A connection of theirs stands for the last address in
    `X-Forwarded-For` that is not one of them, and may be one of any number. Headers of others are ignored."""
    models_directory: str | None = None
    """Folder whose files (`*.json`, as `medha.api.declared` writes them) name the models that manifests
    declare; read again when they change. The operator fills it through a ConfigMap, `medha up` with its
    manifest's model."""
    api_keys_file: Path | None = None
    """File of API keys (docs/api-keys.md), read again when it changes. None: requests need no key."""
    tls_certificate_file: Path | None = None
    """File of a certificate chain (PEM); clients are then served by TLS only. Read again when it changes, with its
    key."""
    tls_key_file: Path | None = None
    """File of the private key of `tls_certificate_file` (PEM, without a password)."""
    poll_seconds: float = Field(default=2.0, ge=0.01, le=60)
    """Seconds between two checks of these files: of models, of API keys and of the certificate."""
    max_body_bytes: int = Field(default=64 * 2**20, ge=1)
    max_bodies_bytes: int | None = Field(default=None, ge=1)
    """Largest total size in bytes of all bodies that are being received and tokenised; more get status
    429. Default: 8 times the largest body."""
    max_connections: int = Field(default=8192, ge=1)
    """Largest number of open HTTP connections; lower if the limit on open files requires it. More get
    status 503."""
    head_seconds: float = Field(default=20.0, gt=0)
    """Seconds that a connection may take to send a request's head."""
    body_seconds: float = Field(default=30.0, gt=0)
    """Seconds that a body may take, beyond its bytes at 32 KiB/s."""
    output_seconds: float = Field(default=30.0, gt=0)
    """Seconds for which a client may take none of the output that waits for it; and seconds that it may take
    for all of that, beyond its bytes at 32 KiB/s."""
    idle_seconds: float = Field(default=75.0, gt=0)
    """Seconds for which a connection is kept open between two requests; longer than load balancers keep
    theirs."""
    max_waiting: int = Field(default=4096, ge=1)
    """Largest number of sequences that wait for a replica; more get status 429 with Retry-After."""
    waiting_room_seconds: float = Field(default=0.0, ge=0, le=86400)
    """Longest time for which a request waits for the first replica of a model that a manifest declares;
    longer than a replica takes to start. 0: none waits, and gets status 503 at once."""
    waiting_room_bytes: int | None = Field(default=None, ge=1)
    """Largest total size in bytes of the bodies of those requests, a part of `max_bodies_bytes`; more get
    status 503. One API key or address gets at most three quarters of it. Default: an eighth of `max_bodies_bytes`."""
    replica_start_seconds: float = Field(default=120.0, gt=0, le=86400)
    """Time that a replica takes from its creation until it serves. While none serves, it is the predicted wait in
    `medha_deployment_missed_deadline_seconds_predicted`. Work that is due within a
    quarter of it is urgent: a spare is desired for it, and what it will have grown by when a further replica serves."""
    max_samples: int = Field(default=128, ge=1)
    """Largest number of sequences of one request: `n` times its prompts."""
    large_body_bytes: int = Field(default=256 * 2**10, ge=1)
    """Size in bytes above which a body is parsed, rendered and tokenised in a separate process."""
    tokenize_threads: int = Field(default=2, ge=1, le=64)
    tokenize_processes: int = Field(default=max(2, min(4, (os.cpu_count() or 1) // 2)), ge=1, le=64)
    """Number of large bodies that are processed at the same time; a process starts when it is first
    needed. If there are several, one is kept for bodies below 4 MiB. A 20 MB prompt takes about 2 GB."""
    tokenize_seconds: float = Field(default=30.0, gt=0, le=3600)
    """Seconds after which a tokenising process counts as hung and is replaced; ten more for each MB of a
    body."""
    join_seconds: float = Field(default=60.0, ge=0)
    """Longest time in seconds for which `/accepting` waits, after the start, for the replicas that manifests declare."""
    leave_seconds: float = Field(default=0.0, ge=0)
    """Seconds after SIGTERM for which new requests are still served, until whatever sends them knows that this router
    leaves; then it drains."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """Seconds that open requests get to finish after that."""
    silence_seconds: float = Field(default=2.0, ge=2 * HEARTBEAT_SECONDS)
    """Seconds without a message of a replica, which sends a heartbeat every 0.5 s, after which its streams
    continue on other replicas."""
    unserved_seconds: float = Field(default=60.0, gt=0)
    """Seconds that an accepted request waits for a replica of its model, before it ends with status 503."""
    traces_endpoint: str | None = Field(default=None, pattern=ENDPOINT_PATTERN, max_length=1024)
    """Base URL of an OpenTelemetry collector that gets traces by OTLP (docs/traces.md). None: OpenTelemetry's variables
    (`OTEL_EXPORTER_OTLP_ENDPOINT`) decide, and without them there are no traces."""
    traces_ratio: float | None = Field(default=None, ge=0, le=1)
    """Share of requests that are traced, of those whose client has not decided it. None: `OTEL_TRACES_SAMPLER` decides,
    and by default all are."""
    exit_with_parent: bool = True
    """Exit when the process that started this one has gone, however it ended."""

    @property
    def bodies_budget_bytes(self) -> int:
        """Budget for all bodies that are being received and tokenised."""
        return 8 * self.max_body_bytes if self.max_bodies_bytes is None else self.max_bodies_bytes

    @property
    def waiting_room_budget_bytes(self) -> int:
        """Budget for the bodies of requests that wait for the first replica of their model."""
        return self.bodies_budget_bytes // 8 if self.waiting_room_bytes is None else self.waiting_room_bytes

    @model_validator(mode="after")
    def _certificate_and_key(self) -> RouterSettings:
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            raise ValueError(
                f"tls_certificate_file is {self.tls_certificate_file} and tls_key_file is {self.tls_key_file}; "
                "give both, or neither"
            )
        return self

    @model_validator(mode="after")
    def _waiting_room_leaves_room(self) -> RouterSettings:
        if 2 * self.waiting_room_budget_bytes > self.bodies_budget_bytes:
            raise ValueError(
                f"waiting_room_bytes {self.waiting_room_bytes} is more than half of the {self.bodies_budget_bytes} bytes "
                "for all bodies (max_bodies_bytes), so that waiting requests would keep others out; raise the one or "
                "lower the other"
            )
        return self

    @model_validator(mode="after")
    def _room_for_the_largest_body(self) -> RouterSettings:
        if owner_body_budget(large_body_budget(self.bodies_budget_bytes)) < self.max_body_bytes:
            raise ValueError(
                f"max_bodies_bytes {self.max_bodies_bytes} leaves no room for a body of max_body_bytes "
                f"{self.max_body_bytes}, because an eighth is reserved for small ones, and a quarter of the rest for other "
                "clients; raise the one or lower the other"
            )
        return self
