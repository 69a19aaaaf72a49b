"""Medha's images, built from the Dockerfile without a registry or daemon; cached per user, by content.

    python tests/cluster/images.py [--torch cpu|pypi|none] [operator router worker worker-gpu]

prints the path of an archive for each, as `docker save` writes it; for the first three if none is named. buildah
runs every step with chroot isolation; the base image is built from Debian's packages. Most tests use a worker
image without torch, and mount torch (see docs/images.md). This machine's pip and apt settings for indexes, proxies and certificates
apply inside the build, but do not get into the images.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
TARGETS = ("operator", "router", "worker")
GPU_TARGET = "worker-gpu"
"""A target that no test builds: it is large, and compiles for long."""
KINDS_OF_TORCH = ("cpu", "pypi", "none")
DEBIAN = "bookworm"
_BASE_PACKAGES = ("ca-certificates", "libstdc++6", "passwd", "python3", "python3-venv", "usr-is-merged")
_COMPILER_PACKAGES = (*_BASE_PACKAGES, "g++", "python3-dev")
_BASE = (  # options of mmdebstrap: no trace of the packages' origin
    "--variant=essential",
    "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",
    "--dpkgopt=path-exclude=/usr/share/man/*",
    "--dpkgopt=path-exclude=/usr/share/locale/*",
    "--dpkgopt=path-exclude=/usr/share/doc/*",
    "--dpkgopt=path-include=/usr/share/doc/*/copyright",
    '--customize-hook=rm -rf "$1"/etc/apt/sources.list "$1"/etc/apt/apt.conf.d/99mmdebstrap "$1"/var/log/*',
    '--customize-hook=rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED',
)
_PROGRAMS = {"buildah": "buildah", "mmdebstrap": "mmdebstrap", "unshare": "util-linux"}
_SIZES = """\
the worker holds torch. Where pip is offered a CPU build (2.13.0+cpu, such as by PIP_FIND_LINKS=folder) it takes that, 200 MB.
images: Where it finds only PyPI's build for CUDA, it downloads 3 GB and needs up to 20 GB of disk meanwhile."""
_KEPT_ARCHIVES = 3
_KEPT_LAYERS = 400
"""Most layers in the store before it is emptied; a code change adds about thirty, of a few megabytes."""


class CannotBuild(Exception):
    """An image cannot be built here; says what is missing or what failed."""


def cache_folder() -> Path:
    """Return the folder of archives, layers and logs."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "medha" / "images"


def name(target: str) -> str:
    """Return the name of the archive's image on a node."""
    return f"docker.io/library/medha-{target}:{VERSION}"


def build(targets: Iterable[str] = TARGETS, *, torch: str = "none") -> dict[str, Path]:
    """Build what is not cached yet and return an archive for each target; progress goes to stderr.

    Args:
        targets: of the Dockerfile.
        torch: the Dockerfile's argument `TORCH`: which torch the worker holds.

    Raises:
        CannotBuild: a program is missing (the error names apt's command), or a step failed.
    """
    content = _content_key()
    folder = cache_folder()
    archives = {}
    for target in targets:
        kind = f"-torch-{torch}" if target == "worker" else ""
        archives[target] = folder / f"medha-{target}{kind}-{content}.tar"
    if all(archive.is_file() for archive in archives.values()):
        for archive in archives.values():
            archive.touch()  # those that were used last are kept
        return archives
    _require_programs()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock, tempfile.TemporaryDirectory(prefix="medha-images-") as scratch:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits, and uses what the first has built
        builder = _Builder(folder, Path(scratch))
        for target, archive in archives.items():
            if not archive.is_file():
                _make_room(folder, content, builder, room_bytes(target, torch))
                builder.build(target, archive, torch=torch)
                _forget_older(archive, content)
    return archives


class _Builder:
    """buildah with its own store, whose layers are kept between builds."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self._scratch = scratch
        self._log = folder / "build.log"
        self._log.write_text("", encoding="utf-8")
        self._store = ["--root", str(folder / "store"), "--runroot", str(scratch / "run")]
        self._buildah("rm", "--all")  # leftovers of a killed build
        if len(self._buildah("images", "--all", "--quiet").split()) > _KEPT_LAYERS:
            self.empty()

    def empty(self) -> None:
        """Remove all layers from the store."""
        self._buildah("rmi", "--all", "--force")

    def build(self, target: str, archive: Path, *, torch: str) -> None:
        base = self._base()
        if target == "worker" and torch != "none":
            _record_event(_SIZES)
        with _timed(f"image {archive.stem}"):
            image = name(target)
            self._buildah(
                "build",
                "--isolation=chroot",
                "--pull=never",
                "--layers",
                "--format=oci",
                f"--build-arg=BASE_IMAGE={base}",
                f"--build-arg=TORCH={torch}",
                *self._compiler(target),
                *self._settings_of_pip(),
                f"--target={target}",
                f"--tag={image}",
                str(ROOT),
            )
            partial = archive.with_suffix(".partial")  # an archive is never visible half-written
            partial.unlink(missing_ok=True)
            # Not oci-archive: buildah always compresses its layers, longer than the build takes.
            self._buildah("push", image, f"docker-archive:{partial}:{image}")
            partial.rename(archive)

    def _compiler(self, target: str) -> list[str]:
        """Return the option that names the image with a compiler, for the target that needs it."""
        return (
            [f"--build-arg=COMPILER_IMAGE={self._base(_COMPILER_PACKAGES)}"] if target == GPU_TARGET else []
        )

    def _base(self, packages: tuple[str, ...] = _BASE_PACKAGES) -> str:
        """Return the name of a base image; if missing, build it from Debian's packages."""
        options = *_BASE, f"--include={','.join(packages)}"
        key = hashlib.sha256("\0".join((DEBIAN, *options)).encode()).hexdigest()[:16]
        image = f"localhost/medha-base:{DEBIAN}-{key}"
        if self._buildah("images", "--quiet", "--filter", f"reference={image}"):
            return image
        with _timed(f"base image of Debian {DEBIAN}"):
            context = self._scratch / "base"
            context.mkdir()
            root = str(context / "root.tar")
            self._run("mmdebstrap", "--quiet", *options, *_settings_of_apt(), DEBIAN, root)
            (context / "Dockerfile").write_text('FROM scratch\nADD root.tar /\nCMD ["python3"]\n')
            self._buildah("build", "--isolation=chroot", "--format=oci", f"--tag={image}", str(context))
            shutil.rmtree(context)
        return image

    def _settings_of_pip(self) -> list[str]:
        """Return build options that pass pip's settings here as a secret and mount the files they name."""
        listed = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
        )
        settings, mounts = pip_settings(listed.stdout)
        secret = self._scratch / "pip.conf"
        secret.write_text(settings, encoding="utf-8")
        return [
            f"--secret=id=pip.conf,src={secret}",
            *(f"--volume={path}:{path}:ro" for path in mounts),
        ]

    def _buildah(self, *arguments: str) -> str:
        return self._run("buildah", *self._store, "--storage-driver=overlay", *arguments)

    def _run(self, *command: str) -> str:
        """Run in a new mount namespace, so that a failed build leaves no mount behind."""
        with self._log.open("a", encoding="utf-8") as log:
            done = subprocess.run(
                ["unshare", "--mount", *command], stdout=subprocess.PIPE, stderr=log, text=True, check=False
            )
            log.write(done.stdout)
        if done.returncode != 0:
            tail = self._log.read_text(encoding="utf-8", errors="replace")[-3000:]
            free_gib = (
                shutil.disk_usage(self._log.parent).free / 2**30
            )  # a full disk also keeps errors out of the log
            raise CannotBuild(
                f"`{' '.join(command)}` failed with status {done.returncode} and {free_gib:.1f} GiB of disk free, see "
                f"{self._log}; its end:\n{tail}"
            )
        return done.stdout.strip()


def pip_settings(listed: str) -> tuple[str, list[str]]:
    """Parse the output of `pip config list`; return a pip.conf, and the local files and folders it names.

    As in pip, settings of the environment and of commands come last and win.
    """
    settings: dict[str, str] = {}
    for line in listed.splitlines():
        key, separator, value = line.partition("=")
        if separator:
            settings[key.rpartition(".")[2]] = str(ast.literal_eval(value))
    words = [word for value in settings.values() for word in value.split()]
    mounts = {word for word in words if Path(word).is_absolute() and Path(word).exists()}
    lines = [f"{key} = " + value.replace("\n", "\n    ") for key, value in settings.items()]
    return "\n".join(["[global]", *lines, ""]), sorted(mounts)


def _settings_of_apt() -> list[str]:
    """Return options with this machine's apt proxies and retries; sources are mmdebstrap's own."""
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True)
    wanted = ("Acquire::http", "Acquire::https", "Acquire::Check-", "Acquire::Retries")
    return [f"--aptopt={line.rstrip(';')}" for line in dump.stdout.splitlines() if line.startswith(wanted)]


def _content_key() -> str:
    """Return the digest of all that the images are built from: the Dockerfile, its context and the bases."""
    ignore = ROOT / ".dockerignore"
    digest = hashlib.sha256("\0".join((DEBIAN, *_BASE, *_COMPILER_PACKAGES)).encode())
    files = [ROOT / "Dockerfile", ignore]
    for line in ignore.read_text(encoding="utf-8").splitlines():
        if line.startswith("!"):
            path = ROOT / line[1:]
            files += [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    for path in files:
        if path.suffix != ".pyc":
            digest.update(f"\0{path.relative_to(ROOT)}\0{path.stat().st_mode & 0o777:o}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _require_programs() -> None:
    missing = sorted({package for program, package in _PROGRAMS.items() if shutil.which(program) is None})
    if missing:
        raise CannotBuild(f"images are built with Debian's packages: apt-get install {' '.join(missing)}")
    if os.geteuid() != 0:
        raise CannotBuild("images are built by root: their files belong to several users")


def _forget_older(archive: Path, content: str) -> None:
    kind = archive.name.removesuffix(f"{content}.tar")
    alike = [path for path in archive.parent.glob("*.tar") if path.name[: -len(f"{content}.tar")] == kind]
    for path in sorted(alike, key=lambda path: path.stat().st_mtime)[:-_KEPT_ARCHIVES]:
        path.unlink()


def room_bytes(target: str, torch: str) -> int:
    """Return the free disk that a build takes: archives and layers of earlier ones give way to it."""
    if target == GPU_TARGET:
        return 32 * 2**30
    return (20 if target == "worker" and torch != "none" else 4) * 2**30


def superfluous(sizes_bytes: Mapping[str, int], content: str, missing_bytes: int) -> list[str]:
    """Return the archives of other contents that give way so that `missing_bytes` become free, the first ones first.

    Args:
        sizes_bytes: The size of each archive by its name, the oldest first.
        content: The digest of the content that is built now.
        missing_bytes: By how much the disk is too full; none is returned if this is not positive.
    """
    chosen = []
    for name_of_archive, size_bytes in sizes_bytes.items():
        if missing_bytes > 0 and not name_of_archive.endswith(f"{content}.tar"):
            chosen.append(name_of_archive)
            missing_bytes -= size_bytes
    return chosen


def _make_room(folder: Path, content: str, builder: _Builder, wanted_bytes: int) -> None:
    """Remove cached archives, and if need be all layers, until a build has its disk."""
    files = sorted(folder.glob("*.tar"), key=lambda path: path.stat().st_mtime)
    sizes_bytes = {path.name: path.stat().st_size for path in files}
    for archive in superfluous(sizes_bytes, content, wanted_bytes - shutil.disk_usage(folder).free):
        _record_event(f"removing {archive}, since the disk is nearly full")
        (folder / archive).unlink()
    if shutil.disk_usage(folder).free < wanted_bytes:
        _record_event("removing all layers, since the disk is nearly full")
        builder.empty()


@contextlib.contextmanager
def _timed(what: str) -> Iterator[None]:
    _record_event(f"building {what} ...")
    began = time.monotonic()
    yield
    _record_event(f"built {what} in {time.monotonic() - began:.0f} s")


def _record_event(text: str) -> None:
    sys.stderr.write(f"images: {text}\n")
    sys.stderr.flush()


def main(arguments: list[str]) -> int:
    """Build images and print their archives; a failed build is an error in CI, only a message elsewhere."""
    parser = argparse.ArgumentParser(description="Build Medha's images without a registry.")
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="TARGET",
        help=f"of {', '.join(TARGETS)}, which are built if none is given, and {GPU_TARGET}",
    )
    parser.add_argument("--torch", choices=KINDS_OF_TORCH, default="cpu", help="which torch the worker holds")
    parser.add_argument(
        "--for-tests",
        action="store_true",
        help="build what CI tests: a worker without torch, whatever --torch says",
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.targets) - {*TARGETS, GPU_TARGET}:
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    try:
        torch = "none" if options.for_tests else options.torch
        archives = build(options.targets or TARGETS, torch=torch)
    except CannotBuild as error:
        _record_event(f"tests that need images will be skipped: {error}")
        return 1 if os.environ.get("CI") else 0
    for archive in archives.values():
        sys.stdout.write(f"{archive}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
