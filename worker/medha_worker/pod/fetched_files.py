"""A folder of fetched files that pods may share: who fetches which file, and which file is as the Hub has it.

A file is compared with the Hub's digest once, when it arrives. A *proof* beside it then says which content was found, in
how many bytes, and when the file had last changed. As long as size and time are the same, nothing is read again; if the
time differs, the file is compared again. Locks are per file, so that pods of different stages fetch at the same time.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ValidationError

_RECORDS = ".medha"
_READ_BYTES = 1 << 24

_Record = TypeVar("_Record", bound=BaseModel)

_log = logging.getLogger("medha.fetch")


class Digest(BaseModel):
    """A digest by which the Hub knows a file's content."""

    kind: Literal["sha256", "git-sha1"]
    """`sha256` of a large file's bytes; `git-sha1` of a small file's bytes behind git's header."""
    value: str


class HubFile(BaseModel):
    """A file of a repository. What the Hub does not say is None, and cannot be compared."""

    size_bytes: int | None
    digest: Digest | None


class Listing(BaseModel):
    """The files of a repository at the commit that a revision named when the Hub was asked."""

    revision: str
    commit: str
    files: dict[str, HubFile]


class Proof(BaseModel):
    """What was found of a file when it was compared."""

    digest: Digest | None
    size_bytes: int
    modified_ns: int


class FetchedFiles:
    """The files in one folder. Their names are plain; the Hub's other folders are not fetched."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._records = folder / _RECORDS

    def prepare(self) -> None:
        """Create the folder, and raise an error if it cannot be written.

        Raises:
            OSError: the volume is read-only, or belongs to others.
        """
        self._records.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Wait until no other pod or thread fetches this file."""
        with (self._records / f"{name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.info("another pod fetches %s into the same folder; waiting for it", name)
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def listing(self) -> Listing | None:
        """Return the listing by which files were fetched last; None if there is none that can be read."""
        return _read(Listing, self._records / "listing.json")

    def keep_listing(self, listing: Listing) -> None:
        """Keep a listing for pods that find no Hub."""
        _write(self._records / "listing.json", listing)

    def is_proven(self, name: str, wanted: HubFile) -> bool:
        """Return whether the file is there, and unchanged since it was compared; it is not read for that."""
        proof, path = _read(Proof, self._proof_path(name)), self.folder / name
        return path.is_file() and proof == _unchanged(path, wanted)

    def has(self, name: str, wanted: HubFile) -> bool:
        """Return whether the file is there as the Hub has it; remove it, with a warning, if it is another one.

        The caller holds the file.
        """
        path = self.folder / name
        if self.is_proven(name, wanted):
            return True
        if not path.is_file():
            return False
        difference = self.compare(name, wanted)
        if difference is None:
            return True
        _log.warning("%s is not as the Hub has it: %s; fetching it again", path, difference)
        return False

    def compare(self, name: str, wanted: HubFile) -> str | None:
        """Compare a file with what the Hub says of it: keep a proof, or remove the file and return what differs."""
        path = self.folder / name
        proof = _unchanged(path, wanted)  # of the time before it is read
        difference = None
        if wanted.size_bytes is not None and proof.size_bytes != wanted.size_bytes:
            difference = f"it has {proof.size_bytes} bytes instead of {wanted.size_bytes}"
        elif (
            wanted.digest is not None
            and (value := digest_of(path, wanted.digest.kind)) != wanted.digest.value
        ):
            difference = f"its {wanted.digest.kind} is {value} instead of {wanted.digest.value}"
        if difference is not None:
            self._proof_path(name).unlink(missing_ok=True)
            path.unlink()
            return difference
        _write(self._proof_path(name), proof)
        return None

    def remove(self, name: str) -> None:
        """Remove a file that the present listing does not have."""
        for path in (self._proof_path(name), self.folder / name):
            path.unlink(missing_ok=True)

    def _proof_path(self, name: str) -> Path:
        return self._records / f"{name}.json"


def digest_of(path: Path, kind: Literal["sha256", "git-sha1"]) -> str:
    """Return a file's digest as the Hub computes it; hexadecimal."""
    if kind == "sha256":
        found = hashlib.sha256()
    else:
        found = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            found.update(part)
    return found.hexdigest()


def _unchanged(path: Path, wanted: HubFile) -> Proof:
    """Return the proof that a file has if it was found to be the wanted one, and nobody has changed it since."""
    status = path.stat()
    return Proof(digest=wanted.digest, size_bytes=status.st_size, modified_ns=status.st_mtime_ns)


def _read(kind: type[_Record], path: Path) -> _Record | None:
    try:
        return kind.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def _write(path: Path, record: BaseModel) -> None:
    """Write a record so that others see all of it or nothing."""
    partial = path.with_name(f"{path.name}.{os.uname().nodename}-{os.getpid()}.partial")
    partial.write_text(record.model_dump_json(), encoding="utf-8")
    partial.rename(path)
