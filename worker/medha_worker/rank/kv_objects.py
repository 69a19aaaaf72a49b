"""Objects of KV in a store that replicas share: an S3-compatible service, or a directory, through the library `obstore`.

An object has the form of a file of the disk tier (`medha_worker.model.kv_files`), so everything in it is verified when it is
read: the identity of the KV, the key of the hashes, the hashes themselves, and a CRC-32 of each block. Its path follows from
identity and hashes, so replicas of another model or grid never find it. Puts are atomic: of files, by renaming. What a killed
writer leaves of a file has a name that nobody reads, and is deleted once it is old.

The store also has the key of the hashes. The first rank that finds none makes it.

The library is imported when a store is opened: only ranks with a store need it.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from isal.isal_zlib import crc32

from medha.api.kv_cache_spec import StoreSpec
from medha.wire.messages import DiskFile
from medha_worker.model.file_pages import whole_pages
from medha_worker.model.kv_files import (
    PREFIX,
    FileDamaged,
    Rows,
    header_text,
    key_tag,
    packed,
    parsed_header,
    prefix_length,
    verify,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_CONNECT_SECONDS = 3
_REQUEST_SECONDS = 10
"""Time of one request, body included."""
_RETRY_SECONDS = 3
"""Time after which a request that has failed is not sent again."""
_REMAINS = re.compile(r"(?:[0-9a-f]{32}\.kv|hash-key)#[0-9]+")
"""Names under which the library writes a file of ours before it renames it."""
Answer = TypeVar("Answer")
_KEY_NAME = "hash-key"
_KEY_BYTES = 32
_KEY_ATTEMPTS, _KEY_PAUSE_SECONDS = 20, 0.1


class StoreFailed(Exception):
    """The store does not answer, or refuses what is asked of it."""


class ObjectMissing(Exception):
    """The store has no such object."""


class KvObjects:
    """The objects of one rank in a store. Any thread may use them."""

    def __init__(self, spec: StoreSpec, identity: str, block_bytes: int) -> None:
        """`identity` names everything that the content of blocks depends on.

        Raises:
            StoreFailed: the store cannot be opened.
        """
        self._identity = blake2b(identity.encode(), digest_size=16).hexdigest()
        self._block_bytes = block_bytes
        self._tag = ""
        self._url = spec.url
        self._folder = Path(spec.directory) if spec.is_files else None
        self._store: ObjectStore | None = None
        self._store = _asking(lambda: _open(spec))

    def shared_key(self) -> str:
        """Return the key of the hashes of this store's objects, hexadecimal; make one if there is none.

        Raises:
            StoreFailed: it can be neither read nor written.
        """
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        for attempt in range(_KEY_ATTEMPTS):
            # A service may refuse to make an object that another replica is making, before it can be read.
            time.sleep(_KEY_PAUSE_SECONDS if attempt > 1 else 0)
            with suppress(ObjectMissing):
                key = bytes(self._get(_KEY_NAME)).decode("ascii", "replace").strip()
                with suppress(ValueError):
                    if len(bytes.fromhex(key)) == _KEY_BYTES:
                        return key
                raise StoreFailed(f"the object {_KEY_NAME} of the store is no key; delete it")
            with suppress(AlreadyExistsError, PreconditionError):  # another replica was first
                self._put(_KEY_NAME, secrets.token_hex(_KEY_BYTES).encode(), mode="create")
        raise StoreFailed(f"the object {_KEY_NAME} can be neither read nor made")

    def use_key(self, key: str) -> None:
        """Count objects of another key of hashes as foreign from now on."""
        self._tag = key_tag(key)

    def has(self, name: str) -> bool:
        """Return whether there is an object of this name.

        Raises:
            StoreFailed: the store does not answer that.
        """
        import obstore

        try:
            _asking(lambda: obstore.head(self._opened, self._path(name)))
        except ObjectMissing:
            return False
        return True

    def read(self, name: str, start: int, count: int) -> Rows:
        """Return blocks `start .. start + count` of an object, verified.

        Raises:
            ObjectMissing: there is no such object.
            FileDamaged: it is not what was written.
            StoreFailed: it cannot be read.
        """
        data = memoryview(self._get(self._path(name)))
        prefix = bytes(data[: PREFIX.size])
        text = bytes(data[PREFIX.size : PREFIX.size + prefix_length(prefix)])
        expected = {"identity": self._identity, "key": self._tag, "block_bytes": self._block_bytes}
        header = parsed_header(prefix, text, name, expected, len(data))
        if start < 0 or count < 1 or start + count > len(header.checksums):
            raise FileDamaged(f"it has {len(header.checksums)} blocks, and {start}+{count} are asked for")
        begin = header.begin + start * self._block_bytes
        found = np.frombuffer(data[begin : begin + count * self._block_bytes], dtype=np.uint8)
        rows = found.reshape(count, self._block_bytes)
        verify(rows, header.checksums[start : start + count])
        return rows

    def write(self, content: DiskFile, rows: Rows) -> None:
        """Write an object of these blocks.

        Raises:
            StoreFailed: it cannot be written.
        """
        checksums = [crc32(row.data) for row in rows]
        header = packed(header_text(self._identity, self._tag, self._block_bytes, content, checksums))
        padding = bytes(whole_pages(len(header)) - len(header))
        self._put(self._path(content.name), b"".join((header, padding, rows.reshape(-1).data)))

    def delete(self, name: str) -> None:
        """Delete an object, if it is there.

        Raises:
            StoreFailed: it cannot be deleted.
        """
        import obstore

        with suppress(ObjectMissing):
            _asking(lambda: obstore.delete(self._opened, self._path(name)))

    def delete_remains(self, unchanged_seconds: float, goes_on: Callable[[], bool] = lambda: True) -> int:
        """Delete what killed writers have left of files of this identity and key; return how many such files there were.

        Other replicas may write to the same folder now. So only unfinished files count that nobody has changed for so long, by
        the clock of the file system, which all writers share. If the writer of such a file is still alive, its rename fails, and
        so does its write. Stop once `goes_on` returns False. A service has no such files.

        Raises:
            OSError: a folder cannot be read, or a file cannot be deleted or made.
        """
        if self._folder is None:
            return 0
        with TemporaryFile(dir=self._folder) as new:  # it has no name, so it cannot remain
            before = os.fstat(new.fileno()).st_mtime - unchanged_seconds
        deleted = 0
        for entry in self._unfinished(self._folder, goes_on):
            with suppress(FileNotFoundError):  # it was finished, or another replica has deleted it
                if entry.stat(follow_symlinks=False).st_mtime < before:
                    os.unlink(entry.path)
                    deleted += 1
        return deleted

    def _unfinished(self, top: Path, goes_on: Callable[[], bool]) -> Iterator[os.DirEntry[str]]:
        """Yield the unfinished files of this identity and key, and of the key itself, until `goes_on` returns False."""
        own = top / self._identity / self._tag
        folders = [top]
        if self._tag and own.is_dir():
            folders += sorted(path for path in own.iterdir() if path.is_dir())
        for folder in takewhile(lambda _: goes_on(), folders):
            with os.scandir(folder) as entries:
                for entry in entries:
                    if _REMAINS.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        yield entry

    @property
    def _opened(self) -> ObjectStore:
        assert self._store is not None
        return self._store

    def _path(self, name: str) -> str:
        """Return the path of an object; those of one key and identity lie together."""
        return f"{self._identity}/{self._tag}/{name[:2]}/{name}.kv"

    def _get(self, path: str) -> Any:
        import obstore

        return _asking(lambda: obstore.get(self._opened, path).bytes())

    def _put(self, path: str, data: bytes, mode: Literal["create", "overwrite"] = "overwrite") -> None:
        import obstore

        try:
            _asking(lambda: obstore.put(self._opened, path, data, mode=mode, use_multipart=False))
        except ObjectMissing as error:
            if self._folder is not None:  # another replica has deleted the unfinished file
                raise
            raise StoreFailed(
                f"kvCache.tiers.store.url is {self._url}, and the service has no such bucket: make the bucket, or correct "
                f"url, endpoint or region of kvCache.tiers.store ({_first_line(error)})"
            ) from error


_LACKS_CREDENTIALS = ("//169.254.169.254/", "Missing SecretAccessKey", "Missing AccessKeyId")
"""Signs of errors without credentials: the library then asks the address at which machines of a cloud find their own."""
_NO_CREDENTIALS = (
    "there are no credentials for the store: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, in a cluster as keys of the Secret "
    "that kvCache.tiers.store.secretName names, for `medha up` in its environment"
)


def _open(spec: StoreSpec) -> ObjectStore:
    from obstore.store import LocalStore, from_url

    if spec.is_files:
        try:
            Path(spec.directory).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:  # FileNotFoundError, too: no object is missing
            raise StoreFailed(f"{type(error).__name__}: {_first_line(error)}") from error
        return LocalStore(spec.directory)
    endpoint: dict[str, Any] = {"endpoint": spec.endpoint.rstrip("/")} if spec.endpoint else {}
    region = spec.region or os.environ.get("AWS_REGION") or "us-east-1"
    return from_url(
        spec.url,
        region=region,
        client_options={
            "allow_http": True,
            "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
            "timeout": timedelta(seconds=_REQUEST_SECONDS),
        },
        retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=_RETRY_SECONDS)},
        **endpoint,
    )


def _asking(ask: Callable[[], Answer]) -> Answer:
    """Return what the store answers.

    Raises:
        ObjectMissing: there is no such object.
        AlreadyExistsError, PreconditionError: there is one already.
        StoreFailed: everything else.
    """
    try:
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

        return ask()
    except ImportError as error:
        raise StoreFailed(f"the library obstore is not installed ({error}); install medha[worker]") from error
    except (AlreadyExistsError, PreconditionError):
        raise
    except FileNotFoundError as error:
        raise ObjectMissing(str(error)[:200]) from error
    except (BaseError, OSError, ValueError) as error:
        first_line = _first_line(error)
        if any(sign in first_line for sign in _LACKS_CREDENTIALS):
            raise StoreFailed(f"{_NO_CREDENTIALS} ({first_line})") from error
        raise StoreFailed(f"{type(error).__name__}: {first_line}") from error


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's text: further ones repeat the settings of the client."""
    return str(error).strip().partition("\n")[0][:300]
