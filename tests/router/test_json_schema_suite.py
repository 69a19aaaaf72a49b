"""Each schema of a public test suite is followed or refused, and no schema that is followed lets an invalid value through."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmark import benchmark


@pytest.mark.long
@pytest.mark.parametrize(
    ("draft", "least_followed"),
    [("draft2020-12", 160), ("draft2019-09", 150), ("draft7", 100), ("draft6", 90)],
)
def test_no_schema_of_the_suite_lets_an_invalid_value_through(
    draft: str, least_followed: int, tmp_path: Path
) -> None:
    """The suite is part of the source archive of `jsonschema`."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--no-binary",
        ":all:",
        "-d",
        str(tmp_path),
    ]
    subprocess.run([*command, f"jsonschema=={version('jsonschema')}"], check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.glob(f"jsonschema-*/json/tests/{draft}")
    found = benchmark("grammar").check_suite(folder)
    assert found["wrong"] == []
    assert found["followed"] >= least_followed
    assert found["accepted"] >= 0.8 * found["valid"]
