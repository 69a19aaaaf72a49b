"""`medha profile`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from medha.cost.cost_profile import Profile
from medha_cli.main import main
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.profiling import step_timer as measuring

SMALL = ("--max-context", "64", "--max-chunk", "16", "--max-decodes", "4", "--rounds", "1", "--threads", "1")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("profile") / "tiny"
    init_checkpoint(directory, preset="tiny", seed=0)
    return directory


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["profile", *map(str, arguments)])


def test_a_profile_is_written_and_its_held_out_test_shown(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "p.json"
    result = run(checkpoint, "-o", target, *SMALL)
    assert result.exit_code == 0, result.output
    profile = Profile.from_json(target.read_bytes())
    assert profile.layers == 2
    assert profile.name.startswith("tiny on ")
    assert "Held-out test" in result.stderr
    assert "1-64" in result.stderr
    assert result.stdout == f"{target}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


def test_a_manifest_names_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "replica.yaml"
    manifest.write_text(
        "apiVersion: medha.dev/v1alpha1\nkind: MedhaReplica\nmetadata: {name: tiny}\n"
        f"spec: {{model: {{name: tiny, source: {{path: {checkpoint}}}, maxModelLen: 40}}, threads: 1}}\n"
    )
    result = run(manifest, "-o", tmp_path / "p.json", *SMALL)
    assert result.exit_code == 0, result.output
    assert "1-39" in result.stderr  # the longest context that leaves room for one token


def test_a_manifest_with_tensor_parallelism_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "replica.yaml"
    manifest.write_text(
        "apiVersion: medha.dev/v1alpha1\nkind: MedhaReplica\nmetadata: {name: tiny}\n"
        f"spec: {{model: {{name: tiny, source: {{path: {checkpoint}}}}}, parallelism: {{tensor: 2}}}}\n"
    )
    result = run(manifest, "-o", tmp_path / "p.json", *SMALL)
    assert result.exit_code == 2
    assert "parallelism.tensor is 2" in result.stderr


def test_ctrl_c_leaves_an_earlier_profile_as_it_was(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "p.json"
    target.write_text("earlier")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "measure", interrupted)
    result = run(checkpoint, "-o", target, *SMALL)
    assert result.exit_code == 130
    assert "is not written" in result.stderr
    assert [path.read_text() for path in tmp_path.iterdir()] == ["earlier"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("-o", "no/such/folder/p.json"),
            "--output is no/such/folder/p.json, whose folder does not exist; make it",
        ),
        (("-o", "/proc/p.json"), "--output: /proc/p.json cannot be written"),
        (("--cpu-time", "--threads", "2"), "--cpu-time measures one thread, but --threads is 2"),
        (("--max-decodes", "1"), "--max-decodes"),
        (("--max-step-seconds", "nan"), "nan is no finite number"),
    ],
)
def test_a_wrong_flag_is_named(checkpoint: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run(checkpoint, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_profile_for_which_there_is_no_room_is_kept_elsewhere(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "folder" / "p.json"
    target.parent.mkdir()
    own = measuring.measure

    def measure(*arguments: Any, **options: Any) -> Any:
        """Measure, and meanwhile the folder goes."""
        steps = own(*arguments, **options)
        target.parent.rmdir()
        return steps

    monkeypatch.setattr(measuring, "measure", measure)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = run(checkpoint, "-o", target, *SMALL)
    assert result.exit_code == 1, result.output
    (kept,) = tmp_path.glob("medha-*.json")
    assert f"the figures are in {kept}" in result.stderr
    assert Profile.from_json(kept.read_bytes()).layers == 2


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    result = run(tmp_path, "-o", tmp_path / "p.json")
    assert result.exit_code == 2
    assert "config.json" in result.stderr
