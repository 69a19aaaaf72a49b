"""The commit that a release is made of, as git knows it."""

from __future__ import annotations

import subprocess
import tarfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from medha_release.refusal import Refusal

BEFORE_FILE = "release/before.txt"
"""File that names the version before: a tag or a commit, behind comments."""


@dataclass(frozen=True)
class Checkout:
    """A clone without uncommitted changes."""

    root: Path
    commit: str
    committed_seconds: int
    """Time of the commit, in Unix seconds."""

    def export(self, folder: Path) -> Path:
        """Write the commit's files to `folder`, without what git ignores, and return the folder."""
        return export(self.root, self.commit, folder)


def clean_checkout(root: Path) -> Checkout:
    """Return the checkout at `root`.

    Raises:
        Refusal: this is no clone, or has changes that are not committed.
    """
    changed = _git(root, "status", "--porcelain").splitlines()
    if changed:
        named = "\n".join(changed[:10])
        raise Refusal(
            f"{len(changed)} files have changes that are not committed; commit or remove them:\n{named}"
        )
    commit, seconds = _git(root, "log", "-1", "--format=%H %ct").split()
    return Checkout(root, commit, int(seconds))


def version_before(root: Path) -> str:
    """Return the commit of the version before this one.

    Raises:
        Refusal: the clone does not have it.
    """
    lines = (root / BEFORE_FILE).read_text(encoding="utf-8").splitlines()
    (name,) = [line for line in lines if line and not line.startswith("#")]
    try:
        return _git(root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").strip()
    except Refusal:
        is_shallow = _git(root, "rev-parse", "--is-shallow-repository").strip() == "true"
        fix = "run `git fetch --unshallow --tags`" if is_shallow else "run `git fetch --tags`"
        kind = "a shallow clone" if is_shallow else "this clone"
        raise Refusal(
            f"{BEFORE_FILE} names {name}, the version before, which {kind} does not have; {fix}"
        ) from None


def export(root: Path, commit: str, folder: Path) -> Path:
    """Write the files of a commit to `folder`, and return it."""
    packed = subprocess.run(
        ["git", "archive", "--format=tar", commit], cwd=root, capture_output=True, check=True
    )
    with tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise Refusal("git is not installed; a release is made of a commit") from None
    if done.returncode != 0:
        raise Refusal(f"`git {' '.join(arguments)}` failed: {done.stderr.strip()}")
    return done.stdout
