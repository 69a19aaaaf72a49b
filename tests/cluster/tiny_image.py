"""Container images of a few static programs, as archives that containerd imports; made without any tool."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

NOBODY = 65532


def write_image(archive: Path, name: str, programs: dict[str, Path], entrypoint: list[str]) -> Path:
    """Write an OCI archive: `programs` (path in the image -> file), run as a user who is not root.

    `name` has a registry and a tag, such as `medha.test/pause:1`: containerd looks for just that name.
    """
    layer = _layer(programs)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": entrypoint, "User": f"{NOBODY}:{NOBODY}"},
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        "history": [{"created_by": "medha tests"}],
    }
    configured = json.dumps(config).encode()
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": _described("application/vnd.oci.image.config.v1+json", configured),
            "layers": [_described("application/vnd.oci.image.layer.v1.tar", layer)],
        }
    ).encode()
    entry = _described("application/vnd.oci.image.manifest.v1+json", manifest)
    entry["annotations"] = {"io.containerd.image.name": name}
    index = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
    with tarfile.open(archive, "w") as out:
        _add(out, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        _add(out, "index.json", index)
        for blob in (layer, configured, manifest):
            _add(out, _blob_path(_digest(blob)), blob)
    return archive


def write_changed(archive: Path, image: Path, name: str, files: dict[str, bytes]) -> Path:
    """Write the image of the OCI archive `image` under another name with `files` (path in it -> content) laid over.

    Layers that `image` has are left out: nodes that know it have them.
    """
    with tarfile.open(image) as known:

        def read(path: str) -> Any:
            member = known.extractfile(path)
            assert member is not None
            return json.load(member)

        (entry,) = read("index.json")["manifests"]
        manifest = read(_blob_path(entry["digest"]))
        config = read(_blob_path(manifest["config"]["digest"]))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as changes:
        for path, content in files.items():
            _add(changes, path, content)
    layer = buffer.getvalue()
    config["rootfs"]["diff_ids"].append(_digest(layer))
    config.pop("history", None)
    configured = json.dumps(config).encode()
    manifest["config"] |= _described(manifest["config"]["mediaType"], configured)
    manifest["layers"].append(_described("application/vnd.oci.image.layer.v1.tar", layer))
    described = json.dumps(manifest).encode()
    entry = _described(entry["mediaType"], described) | {"annotations": {"io.containerd.image.name": name}}
    with tarfile.open(archive, "w") as out:
        _add(out, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        _add(out, "index.json", json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode())
        for blob in (layer, configured, described):
            _add(out, _blob_path(_digest(blob)), blob)
    return archive


def _blob_path(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _layer(programs: dict[str, Path]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as layer:
        passwd = f"root:x:0:0::/:/none\nnobody:x:{NOBODY}:{NOBODY}::/:/none\n"
        _add(layer, "etc/passwd", passwd.encode())
        for path, program in programs.items():
            _add(layer, path.lstrip("/"), program.read_bytes(), mode=0o755)
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, path: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(path)
    entry.size, entry.mode = len(content), mode
    archive.addfile(entry, io.BytesIO(content))


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _described(media_type: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}
