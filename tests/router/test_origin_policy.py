"""Web pages of other sites, and names that point here: over real HTTP, with the headers that browsers send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from medha_router.origin_policy import SitePolicy

from .conftest import MODEL, Router, running_router, start_router, stop_router

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
EVIL = "https://evil.example"


def code(router: Router, **headers: str) -> str | None:
    answer = router.post("/v1/chat/completions", CHAT, headers=headers)
    if answer.status_code == 200:
        return None
    assert answer.status_code == 403
    assert answer.headers["x-request-id"]
    return str(answer.json()["error"]["code"])


@pytest.mark.parametrize(
    "host",
    [
        "localhost:8000",
        "LOCALHOST",
        "127.0.0.1:8000",
        "127.1.2.3",
        "[::1]:8000",
        "[::1]",
        "localhost.:1",
    ],
)
def test_on_loopback_it_is_called_by_the_names_of_this_machine(router: Router, host: str) -> None:
    assert code(router, Host=host) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "10.0.0.5:8000",
        "evil@127.0.0.1@x",
        "[",
        "",
    ],
)
def test_on_loopback_other_names_are_refused_for_they_are_rebound(router: Router, host: str) -> None:
    assert code(router, Host=host) == "forbidden_host"
    assert router.metrics_http.get("/metrics", headers={"Host": host}).status_code == 403
    assert router.http.get("/health", headers={"Host": host}).status_code == 200, "a probe"


@pytest.mark.parametrize(
    "origin", [EVIL, "null", "http://localhost:3000", "http://127.0.0.1", "file://", "x"]
)
def test_pages_of_other_sites_are_refused(router: Router, origin: str) -> None:
    assert code(router, Origin=origin) == "forbidden_origin"


def test_pages_of_the_routers_own_site_are_served(router: Router) -> None:
    assert code(router, Origin=router.url) is None
    assert code(router, Host="localhost", Origin="http://localhost:80") is None


@pytest.mark.parametrize(
    "kind",
    [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "json"],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_a_body_that_is_not_sent_as_json_is_refused(router: Router, path: str, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    answer = router.http.post(path, content=b"{}", headers=headers)
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]["message"]
    for good in ("application/json", "Application/JSON; charset=utf-8"):
        assert router.http.post(path, content=b"{}", headers={"Content-Type": good}).status_code == 400


@pytest.fixture(scope="module")
def open_router(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One that listens on all addresses and lets pages of one site in."""
    router = start_router(
        tmp_path_factory.mktemp("open"), host="0.0.0.0", allowed_origins=["https://chat.example"]
    )
    router.http.base_url = f"http://127.0.0.1:{router.address[1]}"
    yield router
    assert stop_router(router) == 0


def test_off_loopback_any_name_will_do_and_foreign_pages_will_not(open_router: Router) -> None:
    for host in ("10.0.0.5:8000", "medha-router.medha.svc.cluster.local", "chat.example"):
        assert open_router.http.get("/v1/models", headers={"Host": host}).status_code == 200
        refused = open_router.http.get("/v1/models", headers={"Host": host, "Origin": EVIL})
        assert refused.status_code == 403
        own = {"Host": host, "Origin": f"https://{host}"}
        assert open_router.http.get("/v1/models", headers=own).status_code == 200


def test_pages_of_allowed_sites_may_ask_and_read_the_answer(open_router: Router) -> None:
    origin = {"Origin": "https://chat.example"}
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    before = open_router.http.options("/v1/chat/completions", headers={**origin, **asks})
    assert before.status_code == 200
    assert "content-type" in before.headers["access-control-allow-headers"]
    answer = open_router.http.get("/v1/models", headers=origin)
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    assert open_router.http.options("/v1/models", headers={**asks, "Origin": EVIL}).status_code == 403


def test_names_that_are_given_are_the_only_ones_beside_those_of_the_machine(tmp_path: Path) -> None:
    with running_router(tmp_path, allowed_hosts=["Chat.example"]) as router:
        for host, status in (("chat.example:8000", 200), ("localhost", 200), ("other.example", 403)):
            assert router.http.get("/v1/models", headers={"Host": host}).status_code == status
    assert SitePolicy.of("0.0.0.0", ["chat.example"], []).refusal("/v1/models", ["10.0.0.5"], []) is not None
    assert SitePolicy.of("0.0.0.0", [], []).refusal("/v1/models", ["10.0.0.5"], []) is None


def test_scrapers_call_a_pod_by_its_address_whatever_names_clients_may_use(tmp_path: Path) -> None:
    with running_router(tmp_path, allowed_hosts=["chat.example"], metrics_host="0.0.0.0") as router:
        for path in ("/metrics", "/health"):
            answer = router.metrics_http.get(path, headers={"Host": "10.1.2.3:9403"})
            assert answer.status_code == 200
        assert router.http.get("/v1/models", headers={"Host": "10.1.2.3:8000"}).status_code == 403
        refused = router.metrics_http.get("/metrics", headers={"Host": "10.1.2.3:9403", "Origin": EVIL})
        assert refused.status_code == 403
