"""Keep the objects of one kind, and report which of our resources each change concerns.

A store is filled from lists, from the events of a watch, and from answers to our own writes. The answer to an
apply, a patch or a status write is taken in at once, so that a plan never sees a state from before it; a
deletion waits until the API server reports it. The newest version wins: resourceVersions of one kind increase
and can be compared (Kubernetes 1.35, KEP-5504).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from medha.errors import MedhaError
from medha_operator.kube.kinds import Key

Document = Mapping[str, Any]

_log = logging.getLogger(__name__)


class WentBack(MedhaError):
    """The API server's state is older than what it has reported before.

    This happens e.g. after etcd was restored from a backup. What the store knows would hide what exists; the
    process recovers by a restart with a fresh view.
    """


@dataclass(frozen=True, slots=True)
class Entry:
    """An object as last observed."""

    uid: str
    version: int
    concerns: tuple[Key, ...]
    """Keys under which it is found: our resources that must be reconciled when it changes."""
    owner: str | None
    """UID of its controller."""
    facts: Any
    """Facts that a change must touch to matter."""
    document: Any
    """Document to be compared or read; None if the facts suffice."""


@dataclass(slots=True)
class Listing:
    """A list that is being read, page by page."""

    namespace: str | None
    """The namespace that is listed; None for all."""
    known: int
    """Version up to which everything was reported before the list was requested."""
    version: int = 0
    """Version of the list."""
    entries: dict[tuple[str, str], Entry | None] = field(default_factory=dict)
    """Entries by name; None for an object that cannot be read."""
    deleted: dict[tuple[str, str], int] = field(default_factory=dict)
    """Names that the watch has reported as deleted since the list was requested, with the version of that."""


class Store:
    """The objects of one kind.

    `read` makes an entry from a document; `changed` is called with every key concerned by a change.
    """

    def __init__(self, read: Callable[[Document], Entry], changed: Callable[[Key], None]) -> None:
        self._read = read
        self._changed = changed
        self._entries: dict[tuple[str, str], Entry] = {}
        self._groups: dict[Key, dict[tuple[str, str], Entry]] = {}
        self._unreadable: set[tuple[str, str]] = set()
        # By namespace, None for all of them: the version up to which everything was reported, and that of the
        # last list.
        self._delivered_until: dict[str | None, int] = {}
        self._listed: dict[str | None, int] = {}
        self._listings: list[Listing] = []  # in progress

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, key: Key) -> list[Entry]:
        """Return the objects that concern `key`."""
        return list(self._groups.get(key, {}).values())

    def facts(self, namespace: str, name: str) -> Any:
        """Return the facts of an object; None if there is none."""
        entry = self.entry(namespace, name)
        return None if entry is None else entry.facts

    def groups(self) -> list[Key]:
        """Return every key that some object concerns."""
        return list(self._groups)

    def delivered_until(self, namespace: str | None) -> int:
        """Return the version up to which lists and watches of a namespace, or of all, have reported."""
        return self._delivered_until.get(namespace, 0)

    @contextmanager
    def listing(self, namespace: str | None) -> Iterator[Listing]:
        """Enter this before a list of a namespace, or of all, is requested; at the end, take the list in.

        If the block fails, the list is dropped. No plan sees any part of the list before the block ends.
        """
        listing = Listing(namespace, self.delivered_until(namespace))
        self._listings.append(listing)
        try:
            yield listing
        finally:
            self._listings.remove(listing)
        self._take_list(listing)

    def read_page(self, listing: Listing, documents: Iterable[Document], version: str) -> None:
        """Read a page of a list into entries, so that its documents need not be kept.

        A known entry of the same version is used again: a list takes memory only for what has changed.

        Raises:
            WentBack: the list is older than what was reported before it was requested.
        """
        listing.version = int(version)
        if listing.version < listing.known:
            raise WentBack(
                f"the API server lists version {version}, older than the known version {listing.known}: etcd may have been "
                "restored from a backup. The operator restarts, without its earlier view"
            )
        for document in documents:
            name = _name(document)
            known = self._entries.get(name)
            is_known = known is not None and known.version == int(document["metadata"]["resourceVersion"])
            listing.entries[name] = known if is_known else self._entry(name, document)

    def see(self, event: str, document: Document, namespace: str | None = None) -> None:
        """Take in an event of the watch of a namespace, or of all.

        An event that the last list already covers is ignored.
        """
        version = int(document["metadata"]["resourceVersion"])
        self._delivered(namespace, version)
        if event == "BOOKMARK":
            return
        name = _name(document)
        if version <= max(self._listed.get(name[0], 0), self._listed.get(None, 0)):
            return
        if event != "DELETED":
            self._take(name, document)
            return
        for listing in self._listings:
            listing.deleted[name] = version
        if name in self._entries and self._entries[name].version <= version:
            self._remove(name)

    def offer(self, document: Document, quiet: Key | None = None) -> None:
        """Take in an object from elsewhere, such as the answer to a write.

        It is ignored if the watch has already reported that version. `quiet` is the key whose reconcile wrote
        it; it is not notified.
        """
        name = _name(document)
        delivered = max(self.delivered_until(None), self.delivered_until(name[0]))
        if int(document["metadata"]["resourceVersion"]) > delivered:
            self._take(name, document, quiet)

    def entry(self, namespace: str, name: str) -> Entry | None:
        """Return an object as last observed; None if there is none."""
        return self._entries.get((namespace, name))

    def correct(self, namespace: str, name: str, seen: Entry | None, document: Document | None) -> None:
        """Take in what the API server has of one object; None if it has none.

        `seen` is what was known when the object was requested: if the watch has reported another version
        since, that one stays.
        """
        if self.entry(namespace, name) is not seen:
            return
        if document is not None:
            self._take((namespace, name), document)
        elif seen is not None:
            self._remove((namespace, name))

    def _delivered(self, namespace: str | None, version: int) -> None:
        self._delivered_until[namespace] = max(self.delivered_until(namespace), version)

    def _take_list(self, listing: Listing) -> None:
        """Take in a list: objects that are not in it are gone, unless written after it was made.

        An object that the watch has reported as deleted after it was made stays deleted.
        """
        namespace, version = listing.namespace, listing.version
        if version < self._listed.get(namespace, 0):
            return  # a newer list ended first: this one would bring back what was deleted between the two
        self._delivered(namespace, version)
        self._listed[namespace] = version
        for name, entry in list(self._entries.items()):
            is_listed = name in listing.entries or (namespace is not None and name[0] != namespace)
            if not is_listed and entry.version <= version:
                self._remove(name)
        for name, listed in listing.entries.items():
            if listed is not None and listing.deleted.get(name, 0) <= version:
                self._put(name, listed)

    def _take(self, name: tuple[str, str], document: Document, quiet: Key | None = None) -> None:
        entry = self._entry(name, document)
        if entry is not None:
            self._put(name, entry, quiet)

    def _entry(self, name: tuple[str, str], document: Document) -> Entry | None:
        """Read an object; None if it cannot be read: one malformed object must not stop all others."""
        try:
            entry = self._read(document)
        except Exception:  # noqa: BLE001 - anybody may write what is watched
            if name not in self._unreadable:
                _log.exception(
                    "%s %s cannot be read and is passed over", document.get("kind"), "/".join(name)
                )
                self._unreadable.add(name)
            return None
        self._unreadable.discard(name)
        return entry

    def _put(self, name: tuple[str, str], entry: Entry, quiet: Key | None = None) -> None:
        before = self._entries.get(name)
        if before is not None and before.version >= entry.version:
            return
        self._entries[name] = entry
        for key in before.concerns if before is not None else ():
            if key not in entry.concerns:
                self._leave(key, name)
        for key in entry.concerns:
            self._groups.setdefault(key, {})[name] = entry
        if before is None or (before.uid, before.owner, before.concerns, before.facts) != (
            entry.uid,
            entry.owner,
            entry.concerns,
            entry.facts,
        ):
            concerned = entry.concerns if before is None else {*before.concerns, *entry.concerns}
            self._notify(key for key in concerned if key != quiet)

    def _remove(self, name: tuple[str, str]) -> None:
        entry = self._entries.pop(name)
        for key in entry.concerns:
            self._leave(key, name)
        self._notify(entry.concerns)

    def _leave(self, key: Key, name: tuple[str, str]) -> None:
        group = self._groups[key]
        del group[name]
        if not group:
            del self._groups[key]

    def _notify(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._changed(key)


def _name(document: Document) -> tuple[str, str]:
    metadata = document["metadata"]
    return metadata.get("namespace", ""), metadata["name"]
