"""Where the programs of a cluster come from, and what is said where they cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster import binaries
from cluster.conftest import skipping_what_cannot_run


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine without Go, without assets and with nothing built yet."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("KUBEBUILDER_ASSETS", "CI"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def assets(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).touch(mode=0o755)
    return folder


def test_programs_of_kubebuilders_assets_are_taken_and_no_go_is_asked_for(
    bare: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = assets(tmp_path / "assets", "etcd", "kube-apiserver", "kubectl")
    bare.setenv("KUBEBUILDER_ASSETS", str(folder))
    assert binaries.build(["etcd", "kubectl"]) == {"etcd": folder / "etcd", "kubectl": folder / "kubectl"}
    assert not binaries.cache_folder().exists()


def test_what_the_assets_lack_must_be_built(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bare.setenv("KUBEBUILDER_ASSETS", str(assets(tmp_path / "assets", "etcd")))
    with pytest.raises(binaries.CannotBuild, match=r"^kube-scheduler must be built and Go is not installed"):
        binaries.build(["etcd", "kube-scheduler"])


def test_without_go_and_assets_tests_are_skipped_with_one_line_that_names_the_fix(
    bare: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(pytest.skip.Exception) as skipped, skipping_what_cannot_run():
        binaries.build(binaries.CONTROL_PLANE)
    notice = str(skipped.value)
    assert notice.splitlines() == [notice]
    assert "Go is not installed; install Go 1.25 or newer, or set KUBEBUILDER_ASSETS" in notice


def test_in_ci_they_fail(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("CI", "true")
    with pytest.raises(binaries.CannotBuild, match="Go is not installed"), skipping_what_cannot_run():
        binaries.build(binaries.CONTROL_PLANE)


@pytest.mark.parametrize(("ci", "status"), [("", 0), ("true", 1)])
def test_the_early_build_of_ci_fails_where_it_cannot_build_and_a_developers_does_not(
    bare: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ci: str, status: int
) -> None:
    bare.setenv("CI", ci)
    assert binaries.main(["etcd"]) == status
    (notice,) = capsys.readouterr().err.splitlines()
    assert notice.startswith("cluster: tests that need a cluster cannot run: etcd must be built")
