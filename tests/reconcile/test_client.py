"""The client interprets answers of the API server."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from kubernetes.aio.client import Configuration

from medha_operator.kube.client import ApiError, Cluster, proxy_to

SECRET = {"kind": "Secret", "metadata": {"name": "r-keys", "namespace": "default"}}


def creating(reason: str, status: int) -> Any:
    """Create a Secret, which the API server refuses with this answer; return the result."""

    class Refusing(Cluster):
        async def _call(self, *_: Any, **__: Any) -> dict[str, Any]:
            raise ApiError(status, reason, "as the test asks")

    async def create() -> Any:
        cluster = Refusing(cast(Any, None), lambda _: True, lambda _: None, 4.0)
        return await cluster.create(SECRET)

    return asyncio.run(create())


def test_an_object_that_is_there_need_not_be_made() -> None:
    assert creating("AlreadyExists", 409) is None


def test_a_conflict_over_something_else_does_not_mean_that_the_object_is_there() -> None:
    """The update of a quota may conflict; the campaign found a Secret that counted as created (resize/answers/5)."""
    with pytest.raises(ApiError, match="Conflict"):
        creating("Conflict", 409)


def test_the_proxy_is_the_kubeconfigs_or_else_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = Configuration(host="https://api.example:6443")
    for name in ("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert proxy_to(configuration) is None
    monkeypatch.setenv("HTTPS_PROXY", "http://environment:3128")
    assert proxy_to(configuration) == "http://environment:3128"
    monkeypatch.setenv("NO_PROXY", "api.example")
    assert proxy_to(configuration) is None
    configuration.proxy = "http://kubeconfig:3128"
    assert proxy_to(configuration) == "http://kubeconfig:3128"
