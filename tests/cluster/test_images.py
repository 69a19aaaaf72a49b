"""What the images hold, who they run as, and what must not be in them; the Dockerfile's linter has no finding."""

from __future__ import annotations

import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import urllib.parse
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from cluster.conftest import skipping_what_cannot_run
from cluster.images import ROOT, TARGETS, build, name, pip_settings, superfluous

_SITE = "opt/medha/lib/python3"


@dataclass(frozen=True)
class Image:
    """An image read from its archive."""

    reference: str
    config: dict[str, object]
    files: frozenset[str]
    settings: bytes
    """Everything below /etc, and the image's own description."""


def _read(archive: Path) -> Image:
    files: set[str] = set()
    etc: dict[str, bytes] = {}
    with tarfile.open(archive) as outer:

        def stored(path: str) -> IO[bytes]:
            member = outer.extractfile(path)
            assert member is not None
            return member

        (entry,) = json.load(stored("manifest.json"))
        description = stored(entry["Config"]).read()
        for layer in entry["Layers"]:
            with tarfile.open(fileobj=stored(layer)) as inner:
                for member in inner:
                    path = posixpath.normpath(member.name)
                    files.add(path + "/" if member.isdir() else path)
                    if path.startswith("etc/") and member.isfile():
                        content = inner.extractfile(member)
                        assert content is not None
                        etc[path] = content.read()
    (reference,) = entry["RepoTags"]
    return Image(
        reference,
        json.loads(description)["config"],
        frozenset(files),
        b"\n".join([description, *etc.values()]),
    )


@pytest.fixture(scope="module")
def images() -> dict[str, Image]:
    with skipping_what_cannot_run():
        archives = build(TARGETS)
    return {target: _read(archive) for target, archive in archives.items()}


def test_every_image_is_named_and_labelled_with_the_version_of_the_project(images: dict[str, Image]) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for target, image in images.items():
        assert image.reference == name(target) == f"docker.io/library/medha-{target}:{version}"
        assert image.config["Labels"]["org.opencontainers.image.version"] == version  # type: ignore[index]


def test_every_image_runs_as_a_user_whose_name_is_known(images: dict[str, Image]) -> None:
    for image in images.values():
        assert image.config["User"] == "65532:65532"  # a number: `runAsNonRoot` believes no name
        assert b"\nmedha:x:65532:65532:" in image.settings


def test_every_image_holds_its_own_packages_and_nothing_that_builds(images: dict[str, Image]) -> None:
    held = {"operator": "kopf", "router": "fastapi", "worker": "llvmlite"}
    for target, image in images.items():
        packages = {
            path.split("/")[5] for path in image.files if path.startswith(_SITE) and path.count("/") > 5
        }
        assert {held[target], f"medha_{target}", "medha"} <= packages
        assert not packages & {"pip", "setuptools", "wheel", "hatchling", "torch", "pytest"}
        assert not {held[other] for other in TARGETS if other != target} & packages
        programs = {posixpath.basename(path) for path in image.files if "/bin/" in f"/{path}"}
        assert not programs & {"pip", "pip3", "gcc", "cc", "make", "apt-get", "git", "curl"}
        assert not any(path.startswith(("build/", "src/", "wheels/", "root/.cache/")) for path in image.files)


def test_every_module_was_compiled_since_nothing_can_be_where_the_root_is_read_only(
    images: dict[str, Image],
) -> None:
    for image in images.values():
        modules = [path for path in image.files if path.startswith(_SITE) and path.endswith(".py")]
        missing = []
        for path in modules:
            folder, module = posixpath.split(path)
            prefix = f"{folder}/__pycache__/{module.removesuffix('.py')}.cpython-3"
            if not any(f"{prefix}{minor}.pyc" in image.files for minor in range(11, 20)):
                missing.append(path)
        assert modules
        assert not missing


def test_no_image_says_where_its_packages_came_from(images: dict[str, Image]) -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    settings, mounts = pip_settings(listed)
    addresses = [word for word in settings.split() if "://" in word]
    proxies = [value for key, value in os.environ.items() if key.lower().endswith("_proxy") and value]
    for image in images.values():
        for secret in (*addresses, *proxies, "pip.conf", "index-url", "http://deb."):
            assert secret.encode() not in image.settings
        assert "etc/apt/sources.list" not in image.files
        assert not {f"{path.strip('/')}/" for path in mounts if path.startswith("/opt/")} & image.files


def test_pip_inside_the_build_gets_the_settings_of_the_environment_and_the_files_that_they_name(
    tmp_path: Path,
) -> None:
    listed = "\n".join(
        [
            "global.cert='/nowhere/ca.crt'",
            f":env:.find-links='{tmp_path} https://wheels.invalid/'",
            "global.index-url='https://one.invalid/simple'",
            ":env:.index-url='https://two.invalid/simple'",
        ]
    )
    settings, mounts = pip_settings(listed)
    assert settings.splitlines() == [
        "[global]",
        "cert = /nowhere/ca.crt",
        f"find-links = {tmp_path} https://wheels.invalid/",
        "index-url = https://two.invalid/simple",
    ]
    assert mounts == [str(tmp_path)]


def wheel(folder: Path, version: str) -> Path:
    """Write a wheel of torch that holds nothing, and an index's page of it."""
    info = f"torch-{version}.dist-info"
    path = folder / "torch" / f"torch-{version}-py3-none-any.whl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    link = f'<a href="{urllib.parse.quote(path.name)}">{path.name}</a>'
    path.with_name("index.html").write_text(f"<!DOCTYPE html><html><body>{link}</body></html>")
    return path


def packages(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run what fills an image, but its pip only says what it was given, and where."""
    pip = folder / "pip"
    pip.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nexit 3\n')
    pip.chmod(0o755)
    for file in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / file, folder)
    return subprocess.run(
        [ROOT / ".docker" / "packages", *arguments],
        cwd=folder,
        env=environ | {"PATH": f"{folder}:{Path(sys.executable).parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("argument", "offered"),
    [("TORCH_INDEX_URL", "index"), ("TORCH_FIND_LINKS", "index/torch"), ("TORCH_INDEX_URL", None)],
)
def test_the_worker_gets_the_cpu_build_of_torch_from_where_a_build_argument_says_or_nothing(
    tmp_path: Path, argument: str, offered: str | None
) -> None:
    public, given = tmp_path / "public", tmp_path / "index"
    version = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )["torch"]
    wheel(public, version)
    wheel(given, f"{version}+cpu")
    where = (tmp_path / (offered or "public")).as_uri()
    done = packages(tmp_path, "worker", "cpu", **{argument: where})
    assert done.returncode == 3, done.stderr
    options = done.stdout.splitlines()
    assert options[:3] == ["--python", "/opt/medha/bin/python", "install"]
    wanted = tmp_path / "requirements.txt"  # the public index has torch alone
    (line,) = (line for line in wanted.read_text().splitlines() if line.startswith("torch"))
    wanted.write_text(line)
    report = tmp_path / "report.json"
    pip = subprocess.run(
        [
            *(sys.executable, "-m", "pip", *options[2:], "--dry-run", "--ignore-installed", "--quiet"),
            *("--report", report),
        ],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": public.as_uri()},
        capture_output=True,
        text=True,
        check=False,
    )
    if offered is None:
        assert f"No matching distribution found for torch=={version}+cpu" in pip.stderr
        return
    assert pip.returncode == 0, pip.stderr
    (chosen,) = json.loads(report.read_text())["install"]
    assert chosen["metadata"]["version"] == f"{version}+cpu"


def test_a_place_of_a_cpu_build_is_refused_where_another_torch_is_asked_for(tmp_path: Path) -> None:
    done = packages(tmp_path, "worker", "pypi", TORCH_FIND_LINKS=".docker/wheels")
    assert done.returncode == 2
    assert "TORCH is 'pypi'; set it to cpu" in done.stderr


def test_the_image_for_gpus_gets_all_that_the_worker_needs_and_the_extras_gpu_and_traces(
    tmp_path: Path,
) -> None:
    assert packages(tmp_path, "gpu,traces").returncode == 3
    wanted = (tmp_path / "requirements.txt").read_text().splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    own = [line for line in extras["gpu"] if line != "medha[worker]"]
    assert len(own) == len(extras["gpu"]) - 1
    assert sorted(wanted) == sorted([*project["dependencies"], *extras["worker"], *own, *extras["traces"]])


def test_every_image_that_serves_requests_can_export_traces() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert sorted(re.findall(r"\./packages (\S+)", text)) == [
        "gpu,traces",
        "nvcc",
        "operator",
        "router,traces",
        "worker,traces",
    ]


def test_the_linter_has_nothing_to_say_about_the_dockerfile() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [linter, "--failure-threshold", "style", "--disable-ignore-pragma", ROOT / "Dockerfile"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_linter_finds_what_is_wrong_with_a_dockerfile(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text((ROOT / "Dockerfile").read_text().replace("--no-cache-dir ", ""))
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, bad], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "DL3042" in done.stdout


def test_archives_of_other_contents_give_way_the_oldest_first() -> None:
    sizes_bytes = {"medha-worker-old.tar": 3, "medha-worker-new.tar": 3, "medha-router-older.tar": 1}
    assert superfluous(sizes_bytes, "new", 0) == []
    assert superfluous(sizes_bytes, "new", 3) == ["medha-worker-old.tar"]
    assert superfluous(sizes_bytes, "new", 100) == ["medha-worker-old.tar", "medha-router-older.tar"]
