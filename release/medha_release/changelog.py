"""Sections of CHANGELOG.md: cut out for release notes, and begun with a version."""

from __future__ import annotations

import re

from medha_release.refusal import Refusal

_UNRELEASED = "## Unreleased\n"


def section(changelog: str, version: str) -> str:
    """Return what the changelog says of a version, without the heading.

    Raises:
        Refusal: it has no such section, or an empty one.
    """
    heading = rf"^## \[?{re.escape(version)}\]?(?: - \d{{4}}-\d\d-\d\d)?$"
    found = re.search(heading, changelog, re.MULTILINE)
    if found is None:
        raise Refusal(
            f"CHANGELOG.md has no section '## {version}'; run `make version VERSION={version}`, and commit the result"
        )
    text = re.split(r"^## ", changelog[found.end() :], maxsplit=1, flags=re.MULTILINE)[0].strip()
    if not text:
        raise Refusal(f"the section '## {version}' of CHANGELOG.md is empty; say there what has changed")
    return text + "\n"


def begin_section(changelog: str, version: str, date: str) -> str:
    """Return the changelog with what is unreleased moved to a section of `version`.

    Raises:
        Refusal: there is such a section already, or nothing is unreleased.
    """
    if re.search(rf"^## \[?{re.escape(version)}\]?\b", changelog, re.MULTILINE):
        raise Refusal(f"CHANGELOG.md has a section of {version} already; choose another version")
    head, separator, rest = changelog.partition(_UNRELEASED)
    if not separator or not re.split(r"^## ", rest, maxsplit=1, flags=re.MULTILINE)[0].strip():
        raise Refusal("nothing stands under '## Unreleased' in CHANGELOG.md; say there what has changed")
    return f"{head}{_UNRELEASED}\n## {version} - {date}\n{rest}"
