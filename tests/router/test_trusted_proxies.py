"""Whose a request is behind proxies: they speak for their clients if they are trusted, and no client speaks for itself."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from medha_process.router_settings import RouterSettings
from router.conftest import Router, running_router, wait_for
from router.test_connections import HEALTH, MI, dial, head, read_answer

PROXIES = ["127.0.0.4", "127.0.0.16/30"]
PROXY, CLIENT = "127.0.0.4", "127.0.0.9"


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    settings = {
        "trusted_proxies": PROXIES,
        "max_connections": 8,
        "max_body_bytes": MI,
        "max_bodies_bytes": 3 * MI,
        "large_body_bytes": 100_000,
        "log_level": "info",
        "body_seconds": 600,
    }
    with running_router(tmp_path_factory.mktemp("proxied"), **settings) as router:
        yield router


def logged_client(router: Router, source: str, *headers: tuple[str, str]) -> str:
    """Send a request from an address; return the client that the log names."""
    with httpx.Client(base_url=router.url, transport=httpx.HTTPTransport(local_address=source)) as client:
        id_ = client.get("/v1/models", headers=list(headers)).headers["x-request-id"]
    found: list[str] = []

    def is_there() -> bool:
        found[:] = re.findall(rf" id={id_} .*client=(\S+)", router.log.read_text(encoding="utf-8"))
        return bool(found)

    wait_for(is_there, "nothing was logged")
    return found[0].rpartition(":")[0]


@pytest.mark.parametrize(
    ("forwarded", "client"),
    [
        (["203.0.113.9"], "203.0.113.9"),
        (["198.51.100.7, 203.0.113.9"], "203.0.113.9"),  # the client claimed the first
        (["198.51.100.7", "203.0.113.9"], "203.0.113.9"),  # the same, as two headers
        (["203.0.113.9, 127.0.0.17"], "203.0.113.9"),  # through two proxies
        (["203.0.113.9:4711"], "203.0.113.9"),
        (["[2001:db8::1]:4711"], "2001:db8::1"),
        ([], PROXY),
    ],
)
def test_a_trusted_proxy_speaks_for_the_last_address_that_is_not_a_proxys(
    proxied: Router, forwarded: list[str], client: str
) -> None:
    headers = [("X-Forwarded-For", value) for value in forwarded]
    assert logged_client(proxied, PROXY, *headers) == client


def test_nobody_else_speaks_for_anybody(proxied: Router) -> None:
    for name in ("X-Forwarded-For", "Forwarded", "X-Real-IP", "X-Envoy-External-Address"):
        assert logged_client(proxied, CLIENT, (name, "203.0.113.9")) == CLIENT
        if name != "X-Forwarded-For":
            assert logged_client(proxied, PROXY, (name, "203.0.113.9")) == PROXY


def test_on_the_port_for_metrics_nobody_speaks_for_anybody(proxied: Router) -> None:
    """There, `/ui` is answered to this machine only. A proxy elsewhere must not pass for it, and this one is on it."""
    transport = httpx.HTTPTransport(local_address=PROXY)
    with httpx.Client(base_url=str(proxied.metrics_http.base_url), transport=transport) as client:
        assert client.get("/ui/state", headers={"X-Forwarded-For": "203.0.113.9"}).status_code == 200


def test_a_proxy_may_hold_all_connections_and_a_client_three_quarters_of_them(proxied: Router) -> None:
    for source, most in ((CLIENT, 6), (PROXY, 8)):
        wait_for(lambda: proxied.metric("medha_router_http_connections") == 0, "some are open")
        with ExitStack() as stack:
            for _ in range(most):
                connection = stack.enter_context(dial(proxied, source))
                connection.sendall(HEALTH)
                assert read_answer(connection)[0] == 200
            assert read_answer(stack.enter_context(dial(proxied, source)))[0] == 503


def test_clients_of_one_proxy_have_shares_of_their_own_in_the_room_for_bodies(proxied: Router) -> None:
    """The room for large bodies is 2.6 MiB, and one client may have three quarters of that."""
    part = b" " * (MI - 1000)

    def send(stack: ExitStack, client: str) -> socket.socket:
        connection = stack.enter_context(dial(proxied, PROXY))
        connection.sendall(head("/tokenize", MI, f"X-Forwarded-For: {client}") + part)
        return connection

    def held(bodies: int) -> bool:
        return proxied.metric("medha_router_body_bytes") == bodies * len(part)

    wait_for(lambda: proxied.metric("medha_router_http_connections") == 0, "some are open")
    with ExitStack() as stack:
        send(stack, CLIENT)
        wait_for(lambda: held(1), "the first is not read")
        status, _, answer = read_answer(send(stack, CLIENT))
        assert status == 429
        assert b"your own requests" in answer
        wait_for(lambda: held(1), "the second is kept")
        send(stack, "203.0.113.9")
        wait_for(lambda: held(2), "that of another client has no room")
    wait_for(lambda: held(0), "they are kept")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("gateway.example", "'gateway.example' is no network; give an address or a range such as 10.0.0.0/8"),
        ("0.0.0.0/0", "0.0.0.0/0 is every address"),
        ("::/0", "::/0 is every address"),
    ],
)
def test_proxies_that_cannot_be_trusted_are_refused_by_name(given: str, said: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(said)) as refused:
        RouterSettings(key_file=Path("k"), enrolment_file=Path("e"), trusted_proxies=(given,))  # type: ignore[arg-type]
    assert refused.value.errors()[0]["loc"] == ("trusted_proxies", 0)
