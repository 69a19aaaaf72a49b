"""Settings of a router."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field, model_validator

from medha_process.part_settings import PartSettings

_SMALL_SHARE = 8
"""Small bodies have one of this many equal parts of the budget for bodies to themselves."""


def large_body_budget(budget_bytes: int) -> int:
    """Return the bytes that large bodies may take of the budget for all bodies."""
    return budget_bytes - budget_bytes // _SMALL_SHARE


class RouterSettings(PartSettings):
    """Settings of a router: `python -m medha_router`. Endpoints and ports may be left to the system (`*`, 0)."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    control_endpoint: str = "tcp://127.0.0.1:*"
    """ZeroMQ ROUTER that replica controllers connect their control DEALER to."""
    tokens_endpoint: str = "tcp://127.0.0.1:*"
    """ZeroMQ ROUTER that replica controllers connect their token DEALER to."""
    key_file: Path
    """File with the router's secret key; replicas know the public half (docs/security.md)."""
    enrolment_file: Path
    """File with enrolment tokens, one per line; a replica that holds one of them is admitted."""
    ready_file: str | None = None
    """File that is written as JSON {"url", "control", "tokens"} once everything is bound; the same line is
    logged."""
    scratch_directory: str | None = None
    """Directory that keeps replicas' tokenizers for the tokenising processes; default: the system's
    temporary folder. Removing it after the router's end also removes what a killed router leaves."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in `Host` headers by which the router may be called, in addition to localhost and loopback
    addresses. If empty, all names are allowed, unless the router listens on a loopback address."""
    allowed_origins: tuple[str, ...] = ()
    """Origins (`https://chat.example`, or `*` for all) whose web pages may call the router."""
    models_directory: str | None = None
    """Folder whose files (`*.json`, as `medha.declared` writes them) name the models that manifests
    declare; read again when they change. The operator fills it through a ConfigMap, `medha up` with its
    manifest's model."""
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
    idle_seconds: float = Field(default=75.0, gt=0)
    """Seconds for which a connection is kept open between two requests; longer than load balancers keep
    theirs."""
    max_waiting: int = Field(default=4096, ge=1)
    """Largest number of sequences that wait for a replica; more get status 429 with Retry-After."""
    max_samples: int = Field(default=128, ge=1)
    """Largest number of sequences of one request: `n` times its prompts."""
    large_body_bytes: int = Field(default=256 * 2**10, ge=1)
    """Size in bytes above which a body is parsed, rendered and tokenised in a separate process."""
    tokenize_threads: int = Field(default=2, ge=1, le=64)
    tokenize_processes: int = Field(default=max(1, min(4, (os.cpu_count() or 1) // 2)), ge=1, le=64)
    """Number of large bodies that are processed at the same time; a process starts when it is first
    needed. A 20 MB prompt takes about 2 GB."""
    tokenize_seconds: float = Field(default=30.0, gt=0, le=3600)
    """Seconds after which a tokenising process counts as hung and is replaced; ten more for each MB of a
    body."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """Seconds that open requests get to finish after SIGTERM."""
    silence_seconds: float = Field(default=10.0, gt=0)
    unserved_seconds: float = Field(default=60.0, gt=0)
    exit_with_parent: bool = True
    """Exit when the process that started this one has gone, however it ended."""

    @property
    def bodies_budget_bytes(self) -> int:
        """Budget for all bodies that are being received and tokenised."""
        return 8 * self.max_body_bytes if self.max_bodies_bytes is None else self.max_bodies_bytes

    @model_validator(mode="after")
    def _room_for_the_largest_body(self) -> RouterSettings:
        if large_body_budget(self.bodies_budget_bytes) < self.max_body_bytes:
            raise ValueError(
                f"max_bodies_bytes {self.max_bodies_bytes} leaves no room for a body of max_body_bytes "
                f"{self.max_body_bytes}, because an eighth is reserved for small ones; raise the one or lower the other"
            )
        return self
