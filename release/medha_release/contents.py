"""The manifest of a release: what its folder holds, and whether that is whole."""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medha_release.refusal import Refusal

MANIFEST, SUMS = "release.json", "SHA256SUMS"
_CHUNK_BYTES = 1 << 20


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def artifact(path: Path, kind: str, *, is_reproducible: bool) -> dict[str, Any]:
    """Return the entry of a file in a manifest."""
    entry = {
        "name": path.name,
        "kind": kind,
        "bytes": path.stat().st_size,
        "sha256": sha256_of(path),
        "reproducible": is_reproducible,
    }
    return entry | ({"image": image_of(path)} if path.name.endswith(".oci.tar") else {})


def image_of(archive: Path) -> dict[str, str]:
    """Return name and digests of the image in an OCI archive.

    Raises:
        Refusal: it holds no image, or not exactly one.
    """
    try:
        with tarfile.open(archive) as members:
            index = _member(members, "index.json")
            (described,) = json.loads(index)["manifests"]
            name = described["digest"].removeprefix("sha256:")
            manifest = _member(members, f"blobs/sha256/{name}")
    except (KeyError, ValueError, tarfile.TarError) as error:
        raise Refusal(f"{archive.name} is no OCI archive of one image: {error!r}") from error
    found = hashlib.sha256(manifest).hexdigest()
    if found != name:
        raise Refusal(f"{archive.name}: the manifest's digest is {found}, and its index says {name}")
    return {
        "reference": described["annotations"]["org.opencontainers.image.ref.name"],
        "digest": described["digest"],
        "config_digest": json.loads(manifest)["config"]["digest"],
    }


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise KeyError(name)
    return file.read()


def pinned(constraints: str) -> dict[str, str]:
    """Return package -> version of a text of constraints.txt."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", constraints, re.MULTILINE))


def sums(digests: Mapping[str, str]) -> str:
    """Return the text of SHA256SUMS, as `sha256sum --check` reads it, for digests by file name."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))


def problems_of(folder: Path) -> list[str]:
    """Return what is wrong with a release's folder; nothing if it is whole.

    Raises:
        Refusal: the folder has no manifest.
    """
    if not (folder / MANIFEST).is_file():
        raise Refusal(f"{folder} has no {MANIFEST}; run `make release`, or name the release's folder")
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    problems = []
    digests = {}
    for entry in manifest["artifacts"]:
        path = folder / entry["name"]
        digests[path.name] = entry["sha256"]
        if not path.is_file():
            problems.append(f"{path.name} is missing")
        elif sha256_of(path) != entry["sha256"]:
            problems.append(f"{path.name} has another SHA-256 than {MANIFEST} says")
        elif "image" in entry and image_of(path) != entry["image"]:
            problems.append(f"{path.name} holds another image than {MANIFEST} says")
    digests[MANIFEST] = sha256_of(folder / MANIFEST)
    if not (folder / SUMS).is_file() or (folder / SUMS).read_text(encoding="utf-8") != sums(digests):
        problems.append(f"{SUMS} does not fit {MANIFEST}")
    known = {*digests, SUMS}
    strange = [
        path.name for path in sorted(folder.iterdir()) if path.name not in known and path.name[0] != "."
    ]
    return problems + [f"{name} is not in {MANIFEST}" for name in strange]
