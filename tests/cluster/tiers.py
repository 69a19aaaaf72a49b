"""Replicas with KV tiers on a real node: documents that the device cannot hold together, and what a pod reports of its tiers."""

from __future__ import annotations

import json
import random
import shlex
from typing import Any

import httpx

from cluster import medha
from cluster.guide import shown
from cluster.images import ROOT
from cluster.medha import Document
from cluster.nodes import Cluster

PAGE = ROOT / "docs" / "kv-tiers.md"
KEPT = "/var/lib/medha/kv"
"""The directory of a node in the examples of the page."""
DOCUMENT_TOKENS = 8000
"""So many that reading them is predicted to be faster than computing them on any machine."""
DOCUMENTS = range(3)
"""Numbers of the documents. The device holds one, so each evicts the one before."""


def tiered(name: str, **tiers: Any) -> Document:
    """Return a replica of one pod, whose model has the replica's name, with a host tier and these tiers."""
    document = medha.tiny(
        name,
        parallelism={},
        kvCache={"size": "9Mi", "tiers": {"host": {"size": "64Mi"}, **tiers}},
        resources={"accelerator": "none", "requests": {"cpu": "100m", "memory": "512Mi"}},
    )
    document["spec"]["model"]["name"] = name
    return document


def ask(port: int, model: str, number: int) -> tuple[str, int]:
    """Return the text that follows a document, and how many of its tokens were cached."""
    dice = random.Random(number)
    prompt = [dice.randrange(5, 96) for _ in range(DOCUMENT_TOKENS)]
    body = {"model": model, "prompt": prompt, "max_tokens": 12, "ignore_eos": True, "temperature": 0}
    answer = (
        httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=120)
        .raise_for_status()
        .json()
    )
    details = answer["usage"].get("prompt_tokens_details") or {}
    return answer["choices"][0]["text"], details.get("cached_tokens", 0)


def status(cluster: Cluster, replica: str) -> dict[str, Any]:
    """Return what the controller of a replica reports of its memory and its requests; empty while its ranks gather.

    It answers its own pod alone.
    """
    read = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9400/status').read().decode())"
    text = cluster.kubectl("exec", f"{replica}-l0-0", "-c", "worker", "--", "python", "-c", read)
    return dict(json.loads(text)["core"] or {})


def files(cluster: Cluster, folder: str) -> list[str]:
    """Return owner, mode and path of each file with KV below a folder of the node; empty if there is no such folder."""
    found = cluster.run(["find", folder, "-name", "*.kv", "-printf", "%U:%G %m %P\\n"], check=False)
    return [] if found.returncode else sorted(found.stdout.splitlines())


def make_directory(cluster: Cluster, folder: str) -> None:
    """Make a directory of the node by the command of the page, which names its own example."""
    cluster.run(_commands()[0].removeprefix("sudo ").replace(KEPT, folder).split())


def allow_directory(cluster: Cluster) -> None:
    """Let pods write to the page's example, by the command of the page."""
    program, *arguments = shlex.split(_commands()[1].replace("\\\n", ""))
    assert program == "helm"
    cluster.helm(*(str(medha.CHART) if word == "charts/medha" else word for word in arguments))


def _commands() -> list[str]:
    (commands,) = shown(PAGE, "Volumes that pods can write to")
    return commands
