"""A pod that may not write to the volume of a KV tier ends, with an error that names the field, the directory and the fix."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from medha.api.replica import MedhaReplica
from medha.errors import ConfigInvalid
from medha_worker.pod import tier_volumes
from medha_worker.pod.tier_volumes import require_writable_tiers

POD_USER = 65532
STORE = "spec.kvCache.tiers.store"
DISK = "spec.kvCache.tiers.disk"


@pytest.fixture
def mounted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of root in place of the volumes, for a process of the pods' user."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        monkeypatch.setattr(tier_volumes, "disk_directory", lambda _: Path(folder) / "default.r")
        monkeypatch.setattr(tier_volumes, "KV_STORE_DIRECTORY", folder)
        os.seteuid(POD_USER)
        try:
            yield Path(folder)
        finally:
            os.seteuid(0)


def replica(**tiers: dict[str, Any]) -> MedhaReplica:
    return MedhaReplica.model_validate(
        {
            "apiVersion": "medha.dev/v1alpha1",
            "kind": "MedhaReplica",
            "metadata": {"name": "r", "namespace": "default"},
            "spec": {
                "model": {"name": "m", "source": {"path": "/m"}},
                "kvCache": {"tiers": {"host": {"size": "1Gi"}} | tiers},
            },
        }
    )


def as_root(path: Path, mode: int, owner: int) -> None:
    """Give a directory, which is made if there is none, this mode and owner."""
    os.seteuid(0)
    path.mkdir(exist_ok=True)
    path.chmod(mode)
    os.chown(path, owner, owner)
    os.seteuid(POD_USER)


@pytest.mark.parametrize(
    ("tiers", "setting", "fix"),
    [
        ({"disk": {"size": "1Gi", "hostPath": "/srv/kv"}}, f"{DISK}.hostPath is /srv/kv", "chown -R 65532:0 /srv/kv"),
        ({"disk": {"size": "1Gi", "claimName": "kv"}}, f"{DISK}.claimName is kv", "make the root of the volume writable"),
        ({"disk": {"size": "1Gi"}}, f"{DISK} is on an ephemeral volume", "make the root of the volume writable"),
        ({"store": {"url": "file:///mnt/kv"}}, f"{STORE}.url is file:///mnt/kv", "chown -R 65532:0 /mnt/kv"),
        (
            {"store": {"url": "file:///mnt/kv", "claimName": "kv"}},
            f"{STORE}.claimName is kv",
            "make the root of the volume writable",
        ),
    ],
)  # fmt: skip
def test_a_volume_of_root_is_refused_and_one_of_the_pods_user_is_not(
    mounted: Path, tiers: dict[str, Any], setting: str, fix: str
) -> None:
    with pytest.raises(ConfigInvalid) as found:
        require_writable_tiers(replica(**tiers))
    denied = f", and uid 65532 cannot write there: {mounted} has mode 0755 and belongs to 0:0; "
    assert str(found.value).startswith(setting + denied)
    assert fix in str(found.value)
    as_root(mounted, 0o700, POD_USER)
    require_writable_tiers(replica(**tiers))
    assert list(mounted.iterdir()) == []


def test_files_that_another_user_has_left_are_refused_though_the_volume_is_writable(mounted: Path) -> None:
    as_root(mounted, 0o700, POD_USER)
    as_root(mounted / "default.r", 0o755, 1000)
    with pytest.raises(ConfigInvalid, match=r"default\.r has mode 0755 and belongs to 1000:1000"):
        require_writable_tiers(replica(disk={"size": "1Gi", "hostPath": "/srv/kv"}))


def test_a_volume_that_only_root_may_enter_is_refused(mounted: Path) -> None:
    as_root(mounted, 0o700, 0)
    with pytest.raises(ConfigInvalid, match=f"{mounted} has mode 0700 and belongs to 0:0"):
        require_writable_tiers(replica(disk={"size": "1Gi", "hostPath": "/srv/kv"}))


def test_any_other_fault_of_a_volume_is_left_to_the_tier(mounted: Path) -> None:
    os.seteuid(0)
    mounted.rmdir()
    require_writable_tiers(replica(disk={"size": "1Gi"}, store={"url": "file:///mnt/kv"}))
    mounted.mkdir()


def test_a_store_of_objects_needs_no_volume(mounted: Path) -> None:
    require_writable_tiers(replica(store={"url": "s3://bucket/kv"}))
