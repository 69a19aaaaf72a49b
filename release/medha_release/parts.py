"""The parts of a release: each is made from an export of the commit, and becomes files in the release's folder."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from medha_release.bill import bill_of_materials
from medha_release.changelog import section
from medha_release.checkout import Checkout
from medha_release.refusal import Refusal

_SHOWN_CHARACTERS = 3000


@dataclass(frozen=True)
class Order:
    """A release that is to be made."""

    checkout: Checkout
    version: str
    images: tuple[str, ...]
    """Targets of the Dockerfile; none: no images."""
    torch: str
    """Build of torch in the worker's image: `cpu`, `pypi` or `none`."""


@dataclass(frozen=True)
class Part:
    """A part of a release."""

    name: str
    meaning: str
    make: Callable[[Order, Path, Path], None]
    """Called with the order, the folder of the commit's files, and the folder to write to."""
    is_reproducible: bool = True
    """The same commit gives the same bytes."""


def _python(order: Order, sources: Path, out: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(out)]
    _run(command, sources, {"SOURCE_DATE_EPOCH": str(order.checkout.committed_seconds)})


def _chart(order: Order, sources: Path, out: Path) -> None:
    program = _run([sys.executable, "tests/cluster/binaries.py", "helm"], order.checkout.root).strip()
    with tempfile.TemporaryDirectory(prefix="medha-helm-") as home:
        homes = {f"HELM_{kind}_HOME": home for kind in ("CACHE", "CONFIG", "DATA")}
        _run([program, "lint", "--quiet", "charts/medha"], sources, homes)
        _run([program, "package", "charts/medha", "--destination", str(out)], sources, homes)
    (package,) = out.glob("*.tgz")
    if package.name != f"medha-{order.version}.tgz":
        raise Refusal(
            f"Helm has made {package.name}, not medha-{order.version}.tgz; run `make gen`, and commit the result"
        )
    package.write_bytes(with_fixed_times(package.read_bytes(), order.checkout.committed_seconds))
    package.rename(out / f"medha-chart-{order.version}.tgz")


def with_fixed_times(package: bytes, seconds: int) -> bytes:
    """Return a gzipped tar archive whose members are sorted, all of one time, and of modes that no umask changes."""
    packed = BytesIO()
    with (
        tarfile.open(fileobj=BytesIO(package)) as old,
        gzip.GzipFile(fileobj=packed, mode="wb", filename="", mtime=seconds) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda one: one.name):
            member.mtime = seconds
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.uid, member.gid, member.uname, member.gname = 0, 0, "", ""
            new.addfile(member, old.extractfile(member))
    return packed.getvalue()


def _definitions(order: Order, sources: Path, out: Path) -> None:
    files = sorted((sources / "crds").glob("*.yaml"))
    text = "---\n".join(file.read_text(encoding="utf-8") for file in files)
    (out / f"medha-crds-{order.version}.yaml").write_text(text, encoding="utf-8")


def _bill(order: Order, sources: Path, out: Path) -> None:
    pins = (sources / "constraints.txt").read_text(encoding="utf-8")
    text = bill_of_materials(order.version, pins, order.checkout.committed_seconds)
    (out / f"medha-sbom-{order.version}.cdx.json").write_text(text, encoding="utf-8")


def _site(order: Order, sources: Path, out: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="medha-site-") as built:
        command = [sys.executable, "docs/site/build.py", built]
        _run(command, sources, {"SOURCE_DATE_EPOCH": str(order.checkout.committed_seconds)})
        packed = BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
            archive.add(built, f"medha-docs-{order.version}")
        fixed = with_fixed_times(packed.getvalue(), order.checkout.committed_seconds)
        (out / f"medha-docs-{order.version}.tar.gz").write_bytes(fixed)


def _notes(order: Order, sources: Path, out: Path) -> None:
    text = section((sources / "CHANGELOG.md").read_text(encoding="utf-8"), order.version)
    (out / f"medha-notes-{order.version}.md").write_text(
        f"# Medha {order.version}\n\n{text}", encoding="utf-8"
    )


def _images(order: Order, _: Path, out: Path) -> None:
    # These are built from the checkout, which has no changes: archives are cached by content, so the export has the same.
    command = [sys.executable, "tests/cluster/images.py", "--torch", order.torch, *order.images]
    archives = _run(command, order.checkout.root, {"CI": "1"}).split()
    for target, archive in zip(order.images, archives, strict=True):
        _as_oci(
            Path(archive), f"medha-{target}:{order.version}", out / f"medha-{target}-{order.version}.oci.tar"
        )


def _as_oci(archive: Path, reference: str, target: Path) -> None:
    """Write an image of `docker save` as an OCI archive, whose manifest has the digest that registries show."""
    with tempfile.TemporaryDirectory(prefix="medha-oci-", dir=target.parent) as store:
        buildah = ["buildah", "--root", f"{store}/root", "--runroot", f"{store}/run", "--storage-driver=vfs"]
        image = _run([*buildah, "pull", "--quiet", f"docker-archive:{archive}"], target.parent).strip()
        _run([*buildah, "push", "--quiet", image, f"oci-archive:{target}:{reference}"], target.parent)


PARTS = (
    Part("notes", "release notes, from CHANGELOG.md", _notes),
    Part("python", "wheel and source distribution", _python),
    Part("chart", "Helm chart", _chart),
    Part("definitions", "CustomResourceDefinitions", _definitions),
    Part("sbom", "bill of materials of the pinned packages, as CycloneDX", _bill),
    Part("docs", "site of the documentation", _site),
    Part("images", "container images, as OCI archives", _images, is_reproducible=False),
)


def _run(command: list[str], folder: Path, more: Mapping[str, str] | None = None) -> str:
    """Run a program and return its output; its messages go to stderr.

    Raises:
        Refusal: it failed, or is missing.
    """
    if shutil.which(command[0]) is None:
        raise Refusal(f"{command[0]} is not installed: apt-get install {Path(command[0]).name}")
    done = subprocess.run(
        command, cwd=folder, env=os.environ | dict(more or {}), stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        said = done.stdout[-_SHOWN_CHARACTERS:]
        raise Refusal(f"`{' '.join(command)}` failed with status {done.returncode}:\n{said}")
    return done.stdout
