"""Content of a cluster's Secrets: the key files of a replica, of a router, and of the replicas that enrol at it.

Entries are named as the files of the mounted Secret; `medha_links.key_files` reads their content. Each function
makes fresh keys or derives them from existing ones, so that an existing Secret is never made again.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from medha.errors import ConfigInvalid
from medha_links.key_files import SHORTEST_TOKEN, KeyPair, is_key

ROUTER_KEY = "router.key"
TOKENS = "tokens"
ROUTER_PUBLIC = "router.pub"
TOKEN = "token"  # noqa: S105 - the name of a file
CONTROLLER_KEY = "controller.key"
CONTROLLER_PUBLIC = "controller.pub"
RANKS_KEY = "ranks.key"
RANKS_PUBLIC = "ranks.pub"


def replica_secret() -> dict[str, bytes]:
    """Return fresh content of `<replica>-keys`: the controller's key pair, and one that the replica's ranks share."""
    controller, ranks = KeyPair.new(), KeyPair.new()
    return {
        CONTROLLER_KEY: _line(controller.secret),
        CONTROLLER_PUBLIC: _line(controller.public),
        RANKS_KEY: _line(ranks.secret),
        RANKS_PUBLIC: _line(ranks.public),
    }


def router_secret() -> dict[str, bytes]:
    """Return fresh content of `<router>-keys`, for the router alone: its secret key, and the tokens that it admits."""
    return {
        ROUTER_KEY: _line(KeyPair.new().secret),
        TOKENS: _line(secrets.token_urlsafe(SHORTEST_TOKEN).encode()),
    }


def enrolment_secret(router: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the content of `<router>-enrolment`, for replicas: the public key and the first token of `<router>-keys`.

    Raises:
        ConfigInvalid: the router's Secret does not hold the entries of `router_secret`.
    """
    lines = [line.strip() for line in router.get(TOKENS, b"").splitlines()]
    tokens = [line for line in lines if line]
    key = router.get(ROUTER_KEY, b"").strip()
    if not is_key(key):
        raise ConfigInvalid(
            f"the router's Secret holds no key under {ROUTER_KEY!r}; delete the Secret, and the operator makes a new one"
        )
    if not tokens:
        raise ConfigInvalid(
            f"the router's Secret holds no token under {TOKENS!r}; delete the Secret, and the operator makes a new one"
        )
    return {ROUTER_PUBLIC: _line(KeyPair.of_secret(key).public), TOKEN: _line(tokens[0])}


def _line(text: bytes) -> bytes:
    return text + b"\n"
