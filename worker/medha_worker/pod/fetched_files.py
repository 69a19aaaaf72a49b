"""A folder of fetched files that pods may share: who fetches which file, and which file is as the Hub has it.

A file is compared with the Hub's digest once, when it arrives. A *proof* beside it then says which content was found, in
how many bytes, and when the file had last changed. As long as size and time are the same, nothing is read again; if the
time differs, the file is compared again. Locks are per file, so that pods of different stages fetch at the same time.

While a file arrives, the Hub's library gives it a temporary name that no earlier attempt had. A pod that is killed leaves such
a file behind. It is removed later, and only once it is old: where locks do not reach other nodes, a younger one may still be
arriving at one of them.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, TypeVar
from uuid import uuid4

from pydantic import BaseModel, ValidationError

_RECORDS = ".medha"
_READ_BYTES = 1 << 24
LEFT_SECONDS = 600.0
"""Age from which a part of a file is a leftover: a file that arrives changes every few seconds."""

_Record = TypeVar("_Record", bound=BaseModel)

_log = logging.getLogger("medha.fetch")


class Digest(BaseModel):
    """A digest by which the Hub knows a file's content."""

    kind: Literal["sha256", "git-sha1"]
    """`sha256` of a large file's bytes; `git-sha1` of a small file's bytes after git's header."""
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
    """The digest, size and time of a file at its comparison with the Hub."""

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
        with suppress(OSError):  # a volume that has all files may be read-only
            self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        os.utime(self._records)  # gives the file system's own time: clocks of nodes differ
        now = self._records.stat().st_mtime
        for path in self._parts():
            with suppress(FileNotFoundError):
                if now - path.stat().st_mtime > LEFT_SECONDS:
                    path.unlink()

    def arriving_bytes(self) -> int:
        """Return the bytes that are on the volume of files that are still arriving."""
        found = 0
        for path in self._parts():
            with suppress(FileNotFoundError):  # it has just arrived at another pod
                found += path.stat().st_size
        return found

    def _parts(self) -> Iterator[Path]:
        """Yield the temporary files of downloads and of records."""
        yield from self.folder.rglob("*.incomplete")
        yield from self._records.glob("*.partial")

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
        proof = _read(Proof, self._proof_path(name))
        try:
            return proof is not None and proof == _unchanged(self.folder / name, wanted)
        except FileNotFoundError:  # also if another pod has just found it damaged
            return False

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
        """Remove a file that was fetched, and that the present listing does not have; a file that others put there stays."""
        proof, path = _read(Proof, self._proof_path(name)), self.folder / name
        if proof is None:
            return
        with suppress(FileNotFoundError):  # another pod has removed it
            if _is_content(path, proof):
                path.unlink()
        self._proof_path(name).unlink(missing_ok=True)

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


def _is_content(path: Path, proof: Proof) -> bool:
    """Return whether a file still is what was fetched; if the Hub gave no digest, its size decides."""
    if proof.digest is None:
        return path.stat().st_size == proof.size_bytes
    return digest_of(path, proof.digest.kind) == proof.digest.value


def _unchanged(path: Path, wanted: HubFile) -> Proof:
    """Return the proof that a file must have: it was found to be the wanted one, and nobody has changed it since."""
    status = path.stat()
    return Proof(digest=wanted.digest, size_bytes=status.st_size, modified_ns=status.st_mtime_ns)


def _read(kind: type[_Record], path: Path) -> _Record | None:
    try:
        return kind.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def _write(path: Path, record: BaseModel) -> None:
    """Write a record so that others see all of it or nothing."""
    # Pods of several namespaces may have the same host name and process id.
    partial = path.with_name(f"{path.name}.{uuid4().hex}.partial")
    try:
        partial.write_text(record.model_dump_json(), encoding="utf-8")
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
