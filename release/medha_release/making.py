"""The making of a release, part by part; a part that the same commit has made already is kept."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from medha_release.changelog import section
from medha_release.checkout import clean_checkout, version_before
from medha_release.contents import MANIFEST, SUMS, artifact, pinned, sha256_of, sums
from medha_release.parts import PARTS, Order, Part
from medha_release.refusal import Refusal
from medha_release.versions import following, present_version, version_of

_MADE = ".made.json"
"""File of the release's folder that says which part was made of which commit, so that a stopped run can go on."""


def order_of(root: Path, asked: str | None, images: tuple[str, ...], torch: str) -> Order:
    """Return the order of a release of the checkout at `root`.

    Args:
        root: A clone without uncommitted changes.
        asked: The version that is wanted; None: that of pyproject.toml.
        images: Targets of the Dockerfile.
        torch: Which torch the worker's image holds.

    Raises:
        Refusal: the checkout is dirty, its files name another version, or its changelog says nothing of this one.
    """
    version = present_version(root)
    if asked and asked != version:
        raise Refusal(
            f"VERSION is {asked}, and pyproject.toml says {version}; run `make version VERSION={asked}`, and commit the result"
        )
    checkout = clean_checkout(root)
    section((root / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    for path, content in following(root).items():
        if path.read_text(encoding="utf-8") != content:
            raise Refusal(
                f"{path.relative_to(root)} names another version than {version}; run `make gen`, and commit the result"
            )
    return Order(checkout, version, images, torch)


def make(order: Order, folder: Path, say: Callable[[str], None]) -> Path:
    """Make what is missing of a release in `folder`, and return the path of its manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (MANIFEST, SUMS):  # a folder that has them is whole
        (folder / name).unlink(missing_ok=True)
    made = _read(folder / _MADE)
    parts = [part for part in PARTS if part.name != "images" or order.images]
    with tempfile.TemporaryDirectory(prefix="medha-release-") as exported:
        sources = order.checkout.export(Path(exported))
        for part in parts:
            _make_part(part, order, sources, folder, made, say)
        manifest = _manifest(order, sources, folder, parts, made)
    named = {name for part in parts for name in made[part.name]["files"]}
    for path in folder.iterdir():  # of an earlier commit or another order
        if path.name not in named and path.name != _MADE:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    text = json.dumps(manifest, indent=2, sort_keys=True) + "\n"
    digests = {entry["name"]: entry["sha256"] for entry in manifest["artifacts"]}
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    (folder / SUMS).write_text(sums(digests | {MANIFEST: sha256_of(folder / MANIFEST)}), encoding="utf-8")
    return folder / MANIFEST


def _make_part(
    part: Part, order: Order, sources: Path, folder: Path, made: dict[str, Any], say: Callable[[str], None]
) -> None:
    recipe = [order.checkout.commit, order.version]
    recipe += [order.torch, *order.images] if part.name == "images" else []
    known = made.get(part.name)
    if known is not None and known["recipe"] == recipe and _are_whole(folder, known["files"]):
        say(f"{part.name}: kept")
        return
    say(f"{part.name}: making the {part.meaning} ...")
    began = time.monotonic()
    scratch = folder / f".{part.name}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    part.make(order, sources, scratch)
    files = {}
    for path in sorted(scratch.iterdir()):
        files[path.name] = sha256_of(path)
        path.replace(folder / path.name)
    scratch.rmdir()
    made[part.name] = {"recipe": recipe, "files": files}
    (folder / _MADE).write_text(json.dumps(made, indent=2), encoding="utf-8")
    say(f"{part.name}: {', '.join(files)} after {time.monotonic() - began:.0f} s")


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def _are_whole(folder: Path, files: dict[str, str]) -> bool:
    return all(
        (folder / name).is_file() and sha256_of(folder / name) == digest for name, digest in files.items()
    )


def _manifest(
    order: Order, sources: Path, folder: Path, parts: list[Part], made: dict[str, Any]
) -> dict[str, Any]:
    project = (sources / "pyproject.toml").read_text(encoding="utf-8")
    chart = yaml.safe_load((sources / "charts" / "medha" / "Chart.yaml").read_text(encoding="utf-8"))
    assert version_of(project) == chart["version"] == chart["appVersion"] == order.version
    committed = datetime.fromtimestamp(order.checkout.committed_seconds, UTC)
    return {
        "name": "medha",
        "version": order.version,
        "commit": order.checkout.commit,
        "committed": committed.isoformat(),
        "upgrades_from": version_before(order.checkout.root),
        "kubernetes": chart["kubeVersion"],
        "dependencies": pinned((sources / "constraints.txt").read_text(encoding="utf-8")),
        "artifacts": [
            artifact(folder / name, part.name, is_reproducible=part.is_reproducible)
            for part in parts
            for name in made[part.name]["files"]
        ],
    }
