"""A release follows one version, is made of one commit, and is whole or refused."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml

import medha
from medha_release import making
from medha_release.bill import bill_of_materials
from medha_release.changelog import begin_section, section
from medha_release.checkout import clean_checkout, version_before
from medha_release.contents import MANIFEST, SUMS, image_of, problems_of
from medha_release.making import make, order_of
from medha_release.parts import Order, Part, with_fixed_times
from medha_release.refusal import Refusal
from medha_release.versions import FOLLOWERS, ROOT, begun, following, present_version

CHANGELOG = """# Changelog

## Unreleased

- A new thing.

## 0.1.0 - 2026-11-01

- The first thing.
"""
NAMES_AN_IMAGE = re.compile(r"\bmedha-(?:operator|router|worker-gpu|worker):(\d+\.\d+\.\d+)")


def test_every_file_that_names_the_version_follows_pyproject() -> None:
    outdated = [path.name for path, text in following().items() if path.read_text(encoding="utf-8") != text]
    assert outdated == [], "run `make gen` and commit the result"
    assert medha.__version__ == present_version()


def test_no_other_file_names_an_image_of_a_version() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    found = {
        name
        for name in listed.stdout.split("\0")
        if name and (ROOT / name).is_file() and not name.startswith(("tests/", "release/"))
        if NAMES_AN_IMAGE.search((ROOT / name).read_text(encoding="utf-8", errors="replace"))
    }
    assert found <= FOLLOWERS.keys()


def test_chart_and_definitions_have_the_version() -> None:
    chart = yaml.safe_load((ROOT / "charts" / "medha" / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["version"] == chart["appVersion"] == present_version()
    for file in (ROOT / "crds").iterdir():
        labels = yaml.safe_load(file.read_text(encoding="utf-8"))["metadata"]["labels"]
        assert labels["app.kubernetes.io/version"] == present_version()


def test_a_version_begins_in_every_file(tmp_path: Path) -> None:
    for name in ("pyproject.toml", *FOLLOWERS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "CHANGELOG.md").write_text(
        CHANGELOG
    )  # nothing is unreleased in a commit that begins a version
    files = begun(tmp_path, "7.8.9", "2030-01-02")
    assert set(files) == {tmp_path / name for name in ("pyproject.toml", "CHANGELOG.md", *FOLLOWERS)}
    assert all("7.8.9" in text for text in files.values())
    assert "\n## Unreleased\n\n## 7.8.9 - 2030-01-02\n" in files[tmp_path / "CHANGELOG.md"]


@pytest.mark.parametrize(
    ("version", "said"), [("7.8", "three numbers"), ("0.0.1", "lower than"), ("v7.8.9", "three numbers")]
)
def test_a_version_that_is_none_or_lower_is_refused(version: str, said: str) -> None:
    with pytest.raises(Refusal, match=said):
        begun(ROOT, version, "2030-01-02")


def test_notes_are_the_section_of_the_version() -> None:
    assert section(CHANGELOG, "0.1.0") == "- The first thing.\n"
    after = begin_section(CHANGELOG, "0.2.0", "2030-01-02")
    assert section(after, "0.2.0") == "- A new thing.\n"
    with pytest.raises(Refusal, match=r"make version VERSION=0\.2\.0"):
        section(CHANGELOG, "0.2.0")
    with pytest.raises(Refusal, match="nothing stands under"):
        begin_section(after, "0.3.0", "2030-01-02")
    with pytest.raises(Refusal, match=r"has a section of 0\.1\.0 already"):
        begin_section(CHANGELOG, "0.1.0", "2030-01-02")


# --- of which commit --------------------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.invalid")
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A small repository with what a release reads, and two commits."""
    root = tmp_path / "clone"
    for name in ("pyproject.toml", "constraints.txt", "release/before.txt", *FOLLOWERS):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    git(root, "init", "--quiet", "--initial-branch=main")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message=one")
    (root / "release" / "before.txt").write_text(f"# Before\n{git(root, 'rev-parse', 'HEAD')}")
    (root / "CHANGELOG.md").write_text(CHANGELOG.replace("0.1.0", present_version()))
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message=two")
    return root


def test_a_release_is_made_of_a_clean_commit_of_the_version_that_is_asked_for(clone: Path) -> None:
    version = present_version(clone)
    assert order_of(clone, version, (), "none").checkout.commit == git(clone, "rev-parse", "HEAD").strip()
    with pytest.raises(Refusal, match=r"make version VERSION=9\.9\.9"):
        order_of(clone, "9.9.9", (), "none")
    (clone / "new").touch()
    with pytest.raises(Refusal, match="not committed"):
        order_of(clone, None, (), "none")


def test_a_version_without_a_section_or_with_an_outdated_file_is_refused(clone: Path) -> None:
    chart = clone / "charts" / "medha" / "Chart.yaml"
    chart.write_text(chart.read_text().replace(f"appVersion: {present_version()}", "appVersion: 0.0.9"))
    git(clone, "commit", "--quiet", "--all", "--message=three")
    with pytest.raises(Refusal, match=r"Chart.yaml names another version"):
        order_of(clone, None, (), "none")
    (clone / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n")
    git(clone, "commit", "--quiet", "--all", "--message=four")
    with pytest.raises(Refusal, match="has no section"):
        order_of(clone, None, (), "none")


def test_the_version_before_is_in_the_history(clone: Path, tmp_path: Path) -> None:
    assert version_before(clone) == git(clone, "rev-parse", "HEAD~1").strip()
    git(tmp_path, "clone", "--quiet", "--depth=1", clone.as_uri(), "shallow")
    with pytest.raises(Refusal, match="which a shallow clone does not have; run `git fetch --unshallow"):
        version_before(tmp_path / "shallow")
    assert len(version_before(ROOT)) == 40


# --- its folder -------------------------------------------------------------------------------------------


def release_of(clone: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make a release of two parts, of which one has an image; return what was said."""

    def text(order: Order, _: Path, out: Path) -> None:
        (out / "notes.md").write_text(f"notes of {order.checkout.commit}")

    def image(_: Order, __: Path, out: Path) -> None:
        write_image(out / "router.oci.tar")

    parts = (Part("notes", "notes", text), Part("images", "images", image, is_reproducible=False))
    monkeypatch.setattr(making, "PARTS", parts)
    said: list[str] = []
    make(order_of(clone, None, ("router",), "none"), folder, said.append)
    return said


def write_image(path: Path) -> str:
    """Write an OCI archive of an empty image, and return its digest."""
    manifest = json.dumps({"config": {"digest": "sha256:" + "0" * 64}}).encode()
    name = hashlib.sha256(manifest).hexdigest()
    reference = {"org.opencontainers.image.ref.name": "medha-router:1"}
    index = json.dumps({"manifests": [{"digest": f"sha256:{name}", "annotations": reference}]}).encode()
    with tarfile.open(path, "w") as archive:
        for member, content in (("index.json", index), (f"blobs/sha256/{name}", manifest)):
            info = tarfile.TarInfo(member)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return f"sha256:{name}"


def test_a_release_that_was_stopped_goes_on_and_makes_again_what_has_changed(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "release"
    assert not any("kept" in line for line in release_of(clone, folder, monkeypatch))
    (folder / "notes.md").write_text("broken")
    said = release_of(clone, folder, monkeypatch)
    assert [line for line in said if "kept" in line] == ["images: kept"]
    git(clone, "commit", "--quiet", "--allow-empty", "--message=three")
    assert not any("kept" in line for line in release_of(clone, folder, monkeypatch))
    assert git(clone, "rev-parse", "HEAD").strip() in (folder / "notes.md").read_text()


def test_the_manifest_names_every_file_its_digests_and_its_commit(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "release"
    release_of(clone, folder, monkeypatch)
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["commit"] == clean_checkout(clone).commit
    assert manifest["upgrades_from"] == version_before(clone)
    assert manifest["dependencies"]["pydantic"] == pinned_pydantic()
    notes, image = manifest["artifacts"]
    assert notes["sha256"] == hashlib.sha256((folder / "notes.md").read_bytes()).hexdigest()
    assert (notes["reproducible"], image["reproducible"]) == (True, False)
    assert image["image"]["digest"] == write_image(tmp_path / "same.tar")
    assert image["image"]["reference"] == "medha-router:1"
    assert problems_of(folder) == []
    checked = subprocess.run(["sha256sum", "--check", "--quiet", SUMS], cwd=folder, check=False)
    assert checked.returncode == 0


def pinned_pydantic() -> str:
    (line,) = [
        one for one in (ROOT / "constraints.txt").read_text().splitlines() if one.startswith("pydantic==")
    ]
    return line.partition("==")[2]


def test_a_release_that_is_not_whole_is_noticed(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "release"
    with pytest.raises(Refusal, match=f"has no {MANIFEST}"):
        problems_of(tmp_path)
    release_of(clone, folder, monkeypatch)
    (folder / "router.oci.tar").unlink()
    (folder / "notes.md").write_text("other notes")
    (folder / "more").touch()
    assert problems_of(folder) == [
        f"notes.md has another SHA-256 than {MANIFEST} says",
        "router.oci.tar is missing",
        f"more is not in {MANIFEST}",
    ]


def test_an_image_whose_manifest_is_not_that_of_its_digest_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "image.oci.tar"
    write_image(path)
    path.write_bytes(path.read_bytes().replace(b"sha256:0", b"sha256:1"))
    with pytest.raises(Refusal, match="the manifest's digest is"):
        image_of(path)


def test_the_same_files_are_packed_to_the_same_bytes() -> None:
    def packed(names: list[str], seconds: int, mode: int) -> bytes:
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w:gz") as archive:
            for name in names:
                info = tarfile.TarInfo(name)
                info.size, info.mtime, info.mode = 2, seconds, mode
                archive.addfile(info, io.BytesIO(b"ab"))
        return raw.getvalue()

    first = with_fixed_times(packed(["a", "b"], 10, 0o644), 5)
    assert first == with_fixed_times(packed(["b", "a"], 20, 0o600), 5)
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(first))) as archive:
        assert {member.mtime for member in archive} == {5}


def test_the_bill_of_materials_names_every_pinned_package() -> None:
    text = bill_of_materials("1.2.3", "# A comment\npydantic==2.11.1\nPyYAML==6.0\n", 1_000_000)
    assert text == bill_of_materials("1.2.3", "# A comment\npydantic==2.11.1\nPyYAML==6.0\n", 1_000_000)
    document = json.loads(text)
    assert document["bomFormat"] == "CycloneDX"
    assert {one["purl"] for one in document["components"]} == {
        "pkg:pypi/pydantic@2.11.1",
        "pkg:pypi/pyyaml@6.0",
    }
