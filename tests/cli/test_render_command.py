"""`medha render` prints what the operator applies, and says what is wrong with a manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from medha_cli.main import main
from medha_operator.replica.actions import Apply
from reconcile.deployment_world import DeploymentWorld, template
from reconcile.world import World

GRID: dict[str, Any] = {"parallelism": {"tensor": 2, "stream": 2, "kv": 2}}
MODEL: dict[str, Any] = {"name": "m", "source": {"path": "x"}}


def run(folder: Path, *documents: dict[str, Any], flags: tuple[str, ...] = ()) -> Result:
    file = folder / "manifest.yaml"
    file.write_text(yaml.safe_dump_all(documents), encoding="utf-8")
    return CliRunner().invoke(main, ["render", str(file), *flags])


def manifest(kind: str, name: str, **spec: Any) -> dict[str, Any]:
    return {"apiVersion": "medha.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_a_replica_is_rendered_to_what_the_operator_applies_first(tmp_path: Path, form: str) -> None:
    world = World(**GRID)
    expected = [action.manifest for action in world.plan().actions if isinstance(action, Apply)]
    replica = manifest("MedhaReplica", "r", model=MODEL, **GRID)
    result = run(tmp_path, replica, flags=("--uid", "u", "--format", form))
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)["items"] if form == "json" else list(yaml.safe_load_all(result.output))
    assert found == json.loads(json.dumps(expected))
    assert [one["kind"] for one in found].count("StatefulSet") == 2


def test_a_deployment_is_rendered_with_its_replicas_and_theirs(tmp_path: Path) -> None:
    deployment = manifest("MedhaDeployment", "d", replicas=2, template=template())
    found = list(yaml.safe_load_all(run(tmp_path, deployment, flags=("--uid", "u")).output))
    world = DeploymentWorld(2)
    planned = [action.manifest for action in world.plan().actions if isinstance(action, Apply)]
    names = [one["metadata"]["name"] for one in found if one["kind"] == "MedhaReplica"]
    assert names == [one["metadata"]["name"] for one in planned if one["kind"] == "MedhaReplica"]
    sets = [one for one in found if one["kind"] == "StatefulSet"]
    assert [one["metadata"]["name"] for one in sets] == ["d-0-l0", "d-1-l0"]
    assert all(one["spec"]["template"]["metadata"]["labels"]["medha.dev/deployment"] == "d" for one in sets)


def test_the_example_of_prefill_and_decode_replicas_is_rendered() -> None:
    example = Path(__file__).parents[2] / "examples" / "prefill-and-decode.yaml"
    roles = [one["spec"]["template"]["spec"]["role"] for one in yaml.safe_load_all(example.read_text())]
    assert roles == ["prefill", "decode"]
    result = CliRunner().invoke(main, ["render", str(example)])
    assert result.exit_code == 0, result.output
    sets = [one for one in yaml.safe_load_all(result.output) if one["kind"] == "StatefulSet"]
    assert [one["metadata"]["name"] for one in sets] == ["tiny-prefill-0-l0", "tiny-decode-0-l0"]


def test_several_manifests_of_one_file_are_rendered_in_their_order(tmp_path: Path) -> None:
    one, other = (manifest("MedhaReplica", name, model=MODEL) for name in ("one", "other"))
    found = list(yaml.safe_load_all(run(tmp_path, one, other).output))
    names = [entry["metadata"]["name"] for entry in found if entry["kind"] == "Service"]
    assert names == ["one", "other"]


def test_settings_of_the_operator_change_images_and_gangs(tmp_path: Path) -> None:
    settings = tmp_path / "settings.json"
    settings.write_text('{"gpu_worker_image": "mine:1", "gang_apis": ["core"]}', encoding="utf-8")
    replica = manifest("MedhaReplica", "r", model=MODEL, placement={"gang": "core"})
    said = run(tmp_path, replica, flags=("--settings", str(settings))).output
    assert "image: mine:1" in said
    assert "kind: Workload" in said


@pytest.mark.parametrize(
    ("document", "reported"),
    [
        ({"kind": "Deployment"}, "kind: 'Deployment' is neither MedhaReplica nor MedhaDeployment"),
        (manifest("MedhaReplica", "r"), "spec.model: is missing; add it"),
        (manifest("MedhaReplica", "r", model=MODEL, modle=1), "spec.modle: is no field of MedhaReplica"),
        (manifest("MedhaDeployment", "d", template={"spec": {"model": 1}}), "spec.template.spec.model: "),
        (manifest("MedhaReplica", "7b", model=MODEL), "metadata.name must begin with a letter"),
        (manifest("MedhaReplica", "r" * 47, model=MODEL), "no longer than 46"),
        (manifest("MedhaReplica", "r", model=MODEL, placement={"gang": "core"}), "GangUnavailable"),
        (
            [manifest("MedhaReplica", "r")],
            "expected a mapping with a kind, MedhaReplica or MedhaDeployment, found list",
        ),
    ],
)
def test_what_cannot_be_rendered_is_refused_with_the_file_and_the_field(
    tmp_path: Path, document: Any, reported: str
) -> None:
    result = run(tmp_path, document)
    assert result.exit_code == 2
    assert str(tmp_path) in result.output
    assert reported in " ".join(result.output.split())


def test_an_empty_file_and_wrong_settings_are_refused(tmp_path: Path) -> None:
    assert "holds no document" in run(tmp_path).output
    settings = tmp_path / "settings.json"
    replica = manifest("MedhaReplica", "r", model=MODEL)
    assert "cannot be read" in run(tmp_path, replica, flags=("--settings", str(settings))).output
    settings.write_text('{"worker": 1}', encoding="utf-8")
    reported = run(tmp_path, replica, flags=("--settings", str(settings))).output
    assert f"{settings}: worker: " in reported.replace("\n", "")
    assert "pydantic" not in reported


@pytest.mark.parametrize("name", ["Bad Name", "", "a" * 64])
def test_a_namespace_that_no_cluster_has_is_refused(tmp_path: Path, name: str) -> None:
    result = run(tmp_path, manifest("MedhaReplica", "r", model=MODEL), flags=("--namespace", name))
    assert result.exit_code == 2
    assert f"--namespace is {name!r}; it must hold lower-case letters" in " ".join(result.output.split())
