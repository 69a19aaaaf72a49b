"""Check that this pod may write to the volumes of its KV tiers, with an error that says how to fix it."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from medha.api.replica import MedhaReplica
from medha.errors import ConfigInvalid
from medha_process.pod_contract import KV_STORE_DIRECTORY
from medha_worker.pod.pod_parts import disk_directory

_HUNG_SECONDS = 10.0
"""Time after which a volume that does not answer is left to its tier, which tolerates it."""
_BY_THE_KUBELET = (
    "make the root of the volume writable for it; the kubelet does that (fsGroup) unless the volume's driver leaves it to you, "
    "as hostPath and many drivers of NFS do"
)


@dataclass(frozen=True, slots=True)
class TierVolume:
    """A directory that a tier writes to."""

    path: Path
    setting: str
    """The field that asks for it, and its value."""
    on_node: str | None = None
    """The directory of the node that is mounted there, if it is one."""

    def denial(self) -> str | None:
        """Return who is denied to write here and the fix; None if this process's user may write.

        Any other fault of the volume is left to the tier, which then is off.
        """
        try:
            TemporaryFile(dir=self.path).close()
        except PermissionError:
            found, uid, gid = self.path.stat(), os.geteuid(), os.getegid()
            command = f"on the node, run: chown -R {uid}:{gid} {self.on_node}"
            return (
                f"{self.setting}, and uid {uid} cannot write there: {self.path} has mode {stat.S_IMODE(found.st_mode):04o} and "
                f"belongs to {found.st_uid}:{found.st_gid}; {command if self.on_node else _BY_THE_KUBELET}"
            )
        except OSError:
            return None
        return None


def require_writable_tiers(replica: MedhaReplica) -> None:
    """Check the volumes with the files of the disk tier and of the store, if the replica has them.

    Raises:
        ConfigInvalid: this process's user may not write to one of them.
    """
    denials: list[str] = []

    def check() -> None:
        denials.extend(denial for volume in _volumes(replica) if (denial := volume.denial()))

    thread = threading.Thread(target=check, name="medha-tier-volumes", daemon=True)
    thread.start()
    thread.join(_HUNG_SECONDS)
    if denials:
        raise ConfigInvalid(denials[0])


def _volumes(replica: MedhaReplica) -> Iterator[TierVolume]:
    disk, store = replica.spec.kv_cache.disk, replica.spec.kv_cache.store
    directory = disk_directory(replica)
    if disk is not None and directory is not None:
        tier = "spec.kvCache.tiers.disk"
        # A parent that denies searching it is the one to report.
        path = directory if os.access(directory, os.F_OK) else directory.parent
        if disk.host_path is not None:
            yield TierVolume(path, f"{tier}.hostPath is {disk.host_path}", disk.host_path)
        elif disk.claim_name is not None:
            yield TierVolume(path, f"{tier}.claimName is {disk.claim_name}")
        else:
            yield TierVolume(path, f"{tier} is on an ephemeral volume")
    if store is not None and store.is_files:
        tier, path = "spec.kvCache.tiers.store", Path(KV_STORE_DIRECTORY)
        if store.claim_name is not None:
            yield TierVolume(path, f"{tier}.claimName is {store.claim_name}")
        else:
            yield TierVolume(path, f"{tier}.url is {store.url}", store.directory)
