"""What this process knows of the objects of one kind, and which of our resources each change concerns.

A store learns from a list, from the events of a watch, and from answers to our own writes, which come first: so a plan
never sees the time before the writes of the plan before. The newest version wins: resourceVersions of one kind rise
and can be compared (Kubernetes 1.35, KEP-5504).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from medha.errors import MedhaError
from medha_operator.kube.kinds import Key

Document = Mapping[str, Any]

_log = logging.getLogger(__name__)


class WentBack(MedhaError):
    """The API server's present is older than what it has told before, as after etcd was restored from a backup.

    What is known would hide what is there: mended by starting anew, with a fresh view.
    """


@dataclass(frozen=True, slots=True)
class Entry:
    """One object as last seen."""

    uid: str
    version: int
    concerns: tuple[Key, ...]
    """The keys under which it is found: our resources that must be looked at when it changes."""
    owner: str | None
    """UID of its controller."""
    facts: Any
    """What a change must touch to matter."""
    document: Any
    """Kept to be compared or read; None where the facts are all."""


class Store:
    """The objects of one kind. `read` makes an entry of a document; `changed` hears of every key that is concerned."""

    def __init__(self, read: Callable[[Document], Entry], changed: Callable[[Key], None]) -> None:
        self._read = read
        self._changed = changed
        self._entries: dict[tuple[str, str], Entry] = {}
        self._groups: dict[Key, dict[tuple[str, str], Entry]] = {}
        self._unreadable: set[tuple[str, str]] = set()
        # By namespace, None for all of them: up to which version everything was told, and that of the last list.
        self._told_until: dict[str | None, int] = {}
        self._listed: dict[str | None, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, key: Key) -> list[Entry]:
        """The objects that concern `key`."""
        return list(self._groups.get(key, {}).values())

    def facts(self, namespace: str, name: str) -> Any:
        """What matters of one object; None where there is none."""
        entry = self.entry(namespace, name)
        return None if entry is None else entry.facts

    def groups(self) -> list[Key]:
        """Every key that some object concerns."""
        return list(self._groups)

    def told_until(self, namespace: str | None) -> int:
        """The version up to which lists and watches of a namespace, or of all, have told everything."""
        return self._told_until.get(namespace, 0)

    def replace(
        self, documents: Iterable[Document], version: str, namespace: str | None, known: int = 0
    ) -> None:
        """Take a whole list: what is not in it is gone, unless it was written after the list was made.

        `known` is `told_until` from before the list was asked for.

        Raises:
            WentBack: the list is older than that.
        """
        if int(version) < known:
            raise WentBack(
                f"the API server lists version {version} after it has told of {known}: was etcd restored from a backup? "
                "The operator begins anew, with nothing of what it knew"
            )
        listed = {_name(document): document for document in documents}
        self._told(namespace, int(version))
        self._listed[namespace] = int(version)
        for name, entry in list(self._entries.items()):
            is_listed = name in listed or (namespace is not None and name[0] != namespace)
            if not is_listed and entry.version <= int(version):
                self._remove(name)
        for name, document in listed.items():
            self._take(name, document)

    def see(self, event: str, document: Document, namespace: str | None = None) -> None:
        """Take an event of the watch of a namespace, or of all. One that the last list knew comes too late."""
        version = int(document["metadata"]["resourceVersion"])
        self._told(namespace, version)
        if event == "BOOKMARK":
            return
        name = _name(document)
        if version <= max(self._listed.get(name[0], 0), self._listed.get(None, 0)):
            return
        if event != "DELETED":
            self._take(name, document)
        elif name in self._entries and self._entries[name].version <= version:
            self._remove(name)

    def offer(self, document: Document, quiet: Key | None = None) -> None:
        """Take an object from elsewhere, such as the answer to a write, unless the watch has told as much.

        `quiet` is who has written it, and knows.
        """
        name = _name(document)
        told = max(self.told_until(None), self.told_until(name[0]))
        if int(document["metadata"]["resourceVersion"]) > told:
            self._take(name, document, quiet)

    def entry(self, namespace: str, name: str) -> Entry | None:
        """One object as last seen; None where there is none."""
        return self._entries.get((namespace, name))

    def correct(self, namespace: str, name: str, seen: Entry | None, document: Document | None) -> None:
        """Take what the API server has of one object, None where there is none.

        `seen` is what was known when it was asked for: where the watch has told of another one since, that stays.
        """
        if self.entry(namespace, name) is not seen:
            return
        if document is not None:
            self._take((namespace, name), document)
        elif seen is not None:
            self._remove((namespace, name))

    def _told(self, namespace: str | None, version: int) -> None:
        self._told_until[namespace] = max(self.told_until(namespace), version)

    def _take(self, name: tuple[str, str], document: Document, quiet: Key | None = None) -> None:
        """Take an object, unless it makes no sense to us: one that somebody has spoilt must not stop all others."""
        try:
            entry = self._read(document)
        except Exception:  # noqa: BLE001 - anybody may write what is watched
            if name not in self._unreadable:
                _log.exception(
                    "%s %s cannot be read and is passed over", document.get("kind"), "/".join(name)
                )
                self._unreadable.add(name)
            return
        self._unreadable.discard(name)
        self._put(name, entry, quiet)

    def _put(self, name: tuple[str, str], entry: Entry, quiet: Key | None) -> None:
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
            self._tell(key for key in concerned if key != quiet)

    def _remove(self, name: tuple[str, str]) -> None:
        entry = self._entries.pop(name)
        for key in entry.concerns:
            self._leave(key, name)
        self._tell(entry.concerns)

    def _leave(self, key: Key, name: tuple[str, str]) -> None:
        group = self._groups[key]
        del group[name]
        if not group:
            del self._groups[key]

    def _tell(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._changed(key)


def _name(document: Document) -> tuple[str, str]:
    metadata = document["metadata"]
    return metadata.get("namespace", ""), metadata["name"]
