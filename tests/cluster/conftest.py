"""Clusters that tests share. Tests whose cluster cannot run on this machine are skipped; in CI they fail."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster import images
from cluster.binaries import CannotBuild, build
from cluster.control_plane import ControlPlane, control_plane
from cluster.definitions import define
from cluster.namespaces import CannotRun
from cluster.nodes import Cluster, one_node
from cluster.tiny_image import write_image

HELLO_IMAGE = "medha.test/hello:1"


@contextmanager
def skipping_what_cannot_run() -> Iterator[None]:
    """Skip the test if Go, packages or rights are missing; in CI, fail."""
    try:
        yield
    except (CannotBuild, CannotRun, images.CannotBuild) as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error).splitlines()[0])


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane without controllers, with our resource definitions."""
    folder = tmp_path_factory.mktemp("plane")
    with skipping_what_cannot_run(), control_plane(folder, controllers=False, scheduler=False) as running:
        define(running)
        yield running


@pytest.fixture(scope="session")
def controlled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane with controllers: StatefulSets create pods, and owned objects are garbage-collected."""
    folder = tmp_path_factory.mktemp("controlled")
    with (
        skipping_what_cannot_run(),
        control_plane(folder, scheduler=False, before_controllers=define) as running,
    ):
        yield running


def hello_image(folder: Path) -> Path:
    """Write an archive of a minimal server, which answers with its pod's name on port 8080."""
    hello = build(["hello"])["hello"]
    return write_image(folder / "hello.tar", HELLO_IMAGE, {"/hello": hello}, ["/hello"])


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of one real node that has the image `medha.test/hello:1`."""
    folder = tmp_path_factory.mktemp("node")
    with skipping_what_cannot_run(), one_node(folder, [hello_image(folder)]) as running:
        yield running
