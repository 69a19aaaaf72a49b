"""Container images of a few static programs, as archives that containerd imports; built without any tool."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

NOBODY = 65532
_LAYER = "application/vnd.oci.image.layer.v1.tar"


def write_image(archive: Path, name: str, programs: dict[str, Path], entrypoint: list[str]) -> Path:
    """Write an OCI archive of `programs` (path in the image -> file) that run as a non-root user.

    `name` must include registry and tag, such as `medha.test/pause:1`: containerd looks up exactly that name.
    """
    layer = _layer(programs)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": entrypoint, "User": f"{NOBODY}:{NOBODY}"},
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        "history": [{"created_by": "medha tests"}],
    }
    return _write(archive, name, config, [], layer)


def write_changed(archive: Path, image: Path, name: str, files: dict[str, bytes]) -> Path:
    """Write an OCI archive of an image with an additional layer of `files` (path in the image -> content).

    `image` is an archive as `docker save` writes it. Its layers are left out: nodes that have the image have
    them.
    """
    with tarfile.open(image) as known:

        def read(path: str) -> Any:
            member = known.extractfile(path)
            assert member is not None
            return json.load(member)

        (entry,) = read("manifest.json")
        config = read(entry["Config"])
        sizes = [known.getmember(layer).size for layer in entry["Layers"]]
    layers = [
        {"mediaType": _LAYER, "digest": digest, "size": size}
        for digest, size in zip(config["rootfs"]["diff_ids"], sizes, strict=True)
    ]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as changes:
        for path, content in files.items():
            _add(changes, path, content)
    config["rootfs"]["diff_ids"].append(_digest(buffer.getvalue()))
    config.pop("history", None)
    return _write(archive, name, config, layers, buffer.getvalue())


def _write(
    archive: Path, name: str, config: dict[str, Any], below: list[dict[str, Any]], layer: bytes
) -> Path:
    """Write an OCI archive with only its last layer; the layers `below` are described but not included."""
    configured = json.dumps(config).encode()
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": _described("application/vnd.oci.image.config.v1+json", configured),
            "layers": [*below, _described(_LAYER, layer)],
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
