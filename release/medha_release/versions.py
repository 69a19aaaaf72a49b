"""The version of `pyproject.toml`, and the files that follow it: `python -m medha_release.versions`, run by `make gen`.

    python -m medha_release.versions            # writes the version into the files that name it
    python -m medha_release.versions 0.2.0      # begins a version: also pyproject.toml and CHANGELOG.md

Versions have three numbers. A chart and a wheel spell pre-releases differently, so there are none.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from medha_release.changelog import begin_section
from medha_release.refusal import Refusal

ROOT = Path(__file__).resolve().parents[2]
_NUMBERS = r"\d+\.\d+\.\d+"
_PROJECT = "pyproject.toml"
_CHANGELOG = "CHANGELOG.md"
_IMAGE = r"\bmedha-(?:operator|router|worker-gpu|worker):"

FOLLOWERS: Mapping[str, str] = {
    "charts/medha/Chart.yaml": r"^(?:version|appVersion): ",
    "core/medha/__init__.py": r'^__version__ = "',
    "Dockerfile": rf'{_IMAGE}|org\.opencontainers\.image\.version="',
    "docs/images.md": _IMAGE,
    "docs/install.md": rf"{_IMAGE}|targetRevision: v",
    "examples/tiny-model.yaml": _IMAGE,
}
"""File -> pattern of what stands before the version in it; tests, definitions and programs read `medha.__version__`."""


def version_of(project: str) -> str:
    """Return the version that a text of pyproject.toml names."""
    return str(tomllib.loads(project)["project"]["version"])


def present_version(root: Path = ROOT) -> str:
    """Return the version of a checkout."""
    return version_of((root / _PROJECT).read_text(encoding="utf-8"))


def with_version(text: str, before: str, version: str) -> str:
    """Return `text` with `version` behind each match of `before`.

    Raises:
        Refusal: nothing matches.
    """
    changed, count = re.subn(rf"({before}){_NUMBERS}", rf"\g<1>{version}", text, flags=re.MULTILINE)
    if not count:
        raise Refusal(f"no version stands behind {before!r}; correct FOLLOWERS in {__name__}")
    return changed


def following(root: Path = ROOT, version: str | None = None) -> dict[Path, str]:
    """Return path -> content of every file that names the version, as it should be."""
    wanted = version or present_version(root)
    found = {}
    for name, before in FOLLOWERS.items():
        try:
            found[root / name] = with_version((root / name).read_text(encoding="utf-8"), before, wanted)
        except Refusal as refusal:
            raise Refusal(f"{name}: {refusal}") from None
    return found


def begun(root: Path, version: str, date: str) -> dict[Path, str]:
    """Return path -> content of every file that changes when a version begins.

    Args:
        root: The checkout.
        version: Three numbers; not lower than the present version.
        date: Of the release, as YYYY-MM-DD.

    Raises:
        Refusal: this is no version, or a lower one, or the changelog has its section already, or nothing to put there.
    """
    if not re.fullmatch(_NUMBERS, version):
        raise Refusal(f"VERSION is {version!r}; write three numbers, such as 0.2.0")
    present = present_version(root)
    if _numbers(version) < _numbers(present):
        raise Refusal(
            f"VERSION is {version}, which is lower than {present} of {_PROJECT}; write a higher one"
        )
    project = (root / _PROJECT).read_text(encoding="utf-8")
    changelog = (root / _CHANGELOG).read_text(encoding="utf-8")
    return {
        root / _PROJECT: with_version(project, '^version = "', version),
        root / _CHANGELOG: begin_section(changelog, version, date),
        **following(root, version),
    }


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the version into the files that name it.")
    parser.add_argument(
        "version", nargs="?", help="begin this version (default: keep that of pyproject.toml)"
    )
    asked = parser.parse_args().version
    try:
        today = datetime.now(UTC).date().isoformat()
        files = begun(ROOT, asked, today) if asked else following()
    except Refusal as refusal:
        sys.stderr.write(f"{refusal}\n")
        return 2
    for path, content in files.items():
        if path.read_text(encoding="utf-8") != content:
            path.write_text(content, encoding="utf-8")
            sys.stdout.write(f"wrote {path.relative_to(ROOT)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
