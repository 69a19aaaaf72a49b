"""What the Secrets of a cluster hold: the key files of a replica, of a router, and of who enrols at that router.

Names of entries are names of files once a Secret is mounted; their content is what `medha_links.keys` reads. Each
function makes fresh keys or derives from those that are there, so that a Secret that was made is never made again.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from medha.errors import ConfigInvalid
from medha_links.keys import SHORTEST_TOKEN, KeyPair, is_key

ROUTER_KEY = "router.key"
TOKENS = "tokens"
ROUTER_PUBLIC = "router.pub"
TOKEN = "token"  # noqa: S105 - the name of a file
CONTROLLER_KEY = "controller.key"
CONTROLLER_PUBLIC = "controller.pub"
RANKS_KEY = "ranks.key"
RANKS_PUBLIC = "ranks.pub"


def replica_secret() -> dict[str, bytes]:
    """Fresh content of `<replica>-keys`: a pair of the controller's, and one that the replica's ranks share."""
    controller, ranks = KeyPair.new(), KeyPair.new()
    return {
        CONTROLLER_KEY: _line(controller.secret),
        CONTROLLER_PUBLIC: _line(controller.public),
        RANKS_KEY: _line(ranks.secret),
        RANKS_PUBLIC: _line(ranks.public),
    }


def router_secret() -> dict[str, bytes]:
    """Fresh content of `<router>-keys`, for the router alone: its secret key, and the tokens that it admits."""
    return {
        ROUTER_KEY: _line(KeyPair.new().secret),
        TOKENS: _line(secrets.token_urlsafe(SHORTEST_TOKEN).encode()),
    }


def enrolment_secret(router: Mapping[str, bytes]) -> dict[str, bytes]:
    """Content of `<router>-enrolment`, for replicas, from that of `<router>-keys`: the public key and the first token.

    Raises:
        ConfigInvalid: the router's Secret does not hold what `router_secret` makes.
    """
    lines = [line.strip() for line in router.get(TOKENS, b"").splitlines()]
    tokens = [line for line in lines if line]
    key = router.get(ROUTER_KEY, b"").strip()
    if not is_key(key):
        raise ConfigInvalid(
            f"the router's Secret holds no key under {ROUTER_KEY!r}; delete it to have it made anew"
        )
    if not tokens:
        raise ConfigInvalid(
            f"the router's Secret holds no token under {TOKENS!r}; delete it to have it made anew"
        )
    return {ROUTER_PUBLIC: _line(KeyPair.of_secret(key).public), TOKEN: _line(tokens[0])}


def _line(text: bytes) -> bytes:
    return text + b"\n"
