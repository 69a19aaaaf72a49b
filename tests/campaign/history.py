"""Record every pod created in a namespace, by a watch and not by polls, which miss short-lived pods."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cluster.api import Api, Document
from medha_operator.kube.kinds import KINDS, POD, Kind

_IDLE_SECONDS = 0.2


@dataclass
class History:
    """Events of pods and their StatefulSets. Versions are etcd's revisions, which order both kinds."""

    made: dict[str, tuple[str, str, int]] = field(default_factory=dict)
    """UID of a pod -> its name, the UID of its StatefulSet and the version at which it was created."""
    gone: dict[str, int] = field(default_factory=dict)
    """UID of a StatefulSet -> version at which it was deleted."""

    def take(self, event: Document) -> None:
        """Record a watch event of a pod or a StatefulSet."""
        metadata = event["object"]["metadata"]
        version = int(metadata["resourceVersion"])
        match event["type"], event["object"]["kind"]:
            case "ADDED", "Pod":
                (owner,) = metadata["ownerReferences"]
                self.made[metadata["uid"]] = metadata["name"], owner["uid"], version
            case "DELETED", "StatefulSet":
                self.gone[metadata["uid"]] = version

    @property
    def times(self) -> Counter[str]:
        """Name of a pod -> number of times that it was created."""
        return Counter(name for name, _, _ in self.made.values())

    @property
    def late(self) -> list[str]:
        """Pods created after their StatefulSet was deleted, because its controller had not noticed yet."""
        return [
            name for name, owner, version in self.made.values() if version > self.gone.get(owner, version)
        ]

    def beyond(self, usual: History) -> str:
        """Describe which pods were created more often than usual, to help find their creator."""
        more = [
            f"{name} {count} times instead of {usual.times[name]}"
            for name, count in sorted(self.times.items())
            if count > usual.times[name]
        ]
        return ", ".join([*more, *(f"{name} when its StatefulSet had been deleted" for name in self.late)])


@contextmanager
def watched(api: Api, namespace: str) -> Iterator[History]:
    """Yield the history of `namespace` from now on; it is complete at the end of the block."""
    history, ended = History(), threading.Event()

    def follow(kind: Kind) -> None:
        version = api.version(kind, namespace)
        is_last = False
        while not is_last:
            is_last = ended.is_set()
            for event in api.events(kind, namespace, version, _IDLE_SECONDS):
                version = event["object"]["metadata"]["resourceVersion"]
                history.take(event)

    threads = [threading.Thread(target=follow, args=(kind,)) for kind in (POD, KINDS["StatefulSet"])]
    for thread in threads:
        thread.start()
    try:
        yield history
    finally:
        ended.set()
        for thread in threads:
            thread.join()
