"""`medha` shows its help at once, and its errors name the file, the field and the fix."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file, save_file

from medha.api.replica import parse_replica
from medha.cost.cost_profile import Profile
from medha.errors import ConfigInvalid
from medha_cli.local_parts import RunFiles, write_parts
from medha_cli.main import main
from medha_cli.manifest import model_directory, read_manifest
from medha_worker.checkpoints.preflight import require_possible

REPLICA = {
    "apiVersion": "medha.dev/v1alpha1",
    "kind": "MedhaReplica",
    "metadata": {"name": "x"},
    "spec": {"model": {"name": "m", "source": {"path": "model"}}},
}
TEXT = """\
apiVersion: medha.dev/v1alpha1
kind: MedhaReplica
metadata: {name: x}
spec:
  model: {name: m, source: {path: model}}
"""


def medha(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """A valid manifest, beside a folder that looks like a checkpoint."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    path = tmp_path / "replica.yaml"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("checkpoint") / "model"
    assert medha("model", "init", target).exit_code == 0
    return target


@pytest.fixture
def checkpoint_manifest(checkpoint: Path) -> Path:
    """A valid manifest of a real checkpoint."""
    path = checkpoint.parent / "replica.yaml"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds 0 documents, expected one MedhaReplica"),
        ("---\n---\n", "holds 0 documents"),
        (TEXT + "---\n" + TEXT, "holds 2 documents"),
        ("a: [1,\n}\n", "replica.yaml:2:1: is not YAML"),
        ("a: b: c\n", "replica.yaml:1:5: is not YAML"),
        ("a: \x07\n", "is not YAML"),
        ("!!python/object:os.system {}\n", "is not YAML"),
        ("d: 2026-99-99\n", "is not YAML"),
        (TEXT + "  lifecycle: {}\n  lifecycle: {}\n", "'lifecycle' is given twice in one mapping; keep one"),
        ("- 1\n", "expected one MedhaReplica mapping, found list"),
        (TEXT.replace("v1alpha1", "v9"), "apiVersion"),
        (TEXT.replace("MedhaReplica", "Deployment"), "kind"),
        (TEXT.replace("metadata: {name: x}\n", ""), "metadata: is missing; add it"),
        (TEXT + "  kvCach: {}\n", "spec.kvCach: is no field of MedhaReplica"),
        (TEXT + "  kvCache: {size: lots}\n", "spec.kvCache.size"),
        (TEXT + "  router: {port: 70000}\n", "spec.router.port"),
        (TEXT.replace("path: model", "path: absent"), "absent has no config.json"),
    ],
)  # fmt: skip
def test_a_bad_manifest_is_refused_with_status_2_and_its_reason(manifest: Path, text: str, said: str) -> None:
    manifest.write_text(text)
    result = medha("up", manifest)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert "Traceback" not in result.output


def test_every_wrong_field_is_named_with_the_file(manifest: Path) -> None:
    manifest.write_text(TEXT + "  kvCach: {}\n  threads: 0\n")
    lines = medha("up", manifest).stderr.splitlines()
    assert len(lines) == 2
    assert all(str(manifest) in line for line in lines)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xfa"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "x.yaml").write_bytes(content)
    result = medha("up", tmp_path / "x.yaml")
    assert result.exit_code == 2
    assert "x.yaml: cannot be read" in result.stderr


def test_the_model_path_starts_at_the_manifests_folder(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    assert read_manifest(manifest).spec.model.source.path == str(tmp_path / "model")


def test_the_example_of_a_grid_has_eight_ranks() -> None:
    replica = read_manifest(Path(__file__).parents[2] / "examples" / "grid.yaml")
    parallelism = replica.spec.parallelism
    assert (parallelism.tensor, parallelism.stream, parallelism.kv) == (2, 2, 2)


def test_the_path_of_a_profile_starts_at_the_manifests_folder(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.json").write_text(Profile(name="p", source="test", layers=1).to_json())
    manifest.write_text(TEXT + "  scheduling: {profile: p.json}\n")
    monkeypatch.chdir("/")
    assert read_manifest(manifest).spec.scheduling.profile == str(tmp_path / "p.json")


def test_a_draft_model_or_head_is_looked_for_in_the_manifests_folder_before_anything_starts(
    checkpoint_manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    monkeypatch.setattr("medha_cli.up_command.supervise", lambda *_, **__: pytest.fail("parts were started"))
    written, folder = checkpoint_manifest.read_text(), checkpoint_manifest.parent
    draft, head = "draftModel: {%s}", "predictionHead: {kind: eagle3, source: {%s}}"
    for form, source, said in (
        (draft, "path: small", f"draftModel.path: {folder}/small has no config.json"),
        (draft, "pvc: {claimName: c}", "draftModel: only a cluster's pods can use this kind of source"),
        (head, "path: small", f"predictionHead.source.path: {folder}/small has no config.json"),
        (head, "pvc: {claimName: c}", "predictionHead.source: only a cluster's pods can use this kind"),
    ):
        speculation = f"{{method: {form.partition(':')[0]}, {form % source}}}"
        checkpoint_manifest.write_text(f"{written}  scheduling: {{speculation: {speculation}}}\n")
        result = medha("up", checkpoint_manifest, "--port", "0")
        assert result.exit_code == 2
        assert f"spec.scheduling.speculation.{said}" in result.stderr


def test_an_eagle3_head_is_made_for_a_checkpoint(tmp_path: Path) -> None:
    assert medha("model", "init", tmp_path / "tiny").exit_code == 0
    made = medha("model", "init", tmp_path / "head", "--eagle3-of", tmp_path / "tiny", "--seed", "3")
    assert made.exit_code == 0
    assert f"an EAGLE-3 head for {tmp_path / 'tiny'}, seed 3" in made.output
    assert json.loads((tmp_path / "head" / "config.json").read_text())["draft_vocab_size"] == 256
    refused = medha("model", "init", tmp_path / "b", "--eagle3-of", tmp_path / "tiny", "--preset", "small")
    assert refused.exit_code == 2
    assert "--preset does not apply to the EAGLE-3 head" in refused.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "p.json cannot be read (No such file or directory); measure one with `medha profile`"),
        ('{"name": "p", "source": "s", "layers": 0}', "layers: Input should be greater than or equal to 1"),
    ],
)
def test_a_profile_that_is_none_is_refused_before_anything_starts(
    manifest: Path, tmp_path: Path, content: str | None, said: str
) -> None:
    manifest.write_text(TEXT + "  scheduling: {profile: p.json}\n")
    if content is not None:
        (tmp_path / "p.json").write_text(content)
    result = medha("up", manifest)
    assert result.exit_code == 2
    assert "spec.scheduling.profile" in result.stderr
    assert said in result.stderr


def test_a_port_in_use_is_named_before_anything_starts(manifest: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = medha("up", manifest, "--port", str(port))
    assert result.exit_code == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in result.stderr
    assert "--port 0" in result.stderr


@pytest.mark.parametrize("endpoint", ["collector:4318", "http://user:password@collector", "grpc://collector"])
def test_a_collector_that_is_no_base_url_is_refused(manifest: Path, endpoint: str) -> None:
    result = medha("up", manifest, "--otlp", endpoint)
    assert result.exit_code == 2
    assert f"--otlp is {endpoint!r}; give the base URL of a collector" in result.stderr


def test_traces_that_cannot_be_made_are_refused_before_anything_starts(
    manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medha_traces.switch._MODULES", ("opentelemetry_that_is_not_there",))
    assert "medha[traces]" not in medha("up", manifest).stderr
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    result = medha("up", manifest)
    assert result.exit_code == 2
    assert "OTEL_EXPORTER_OTLP_ENDPOINT asks for traces" in result.stderr
    assert "pip install 'medha[traces]'" in result.stderr


def test_the_parts_of_medha_up_get_the_collector_of_the_manifest(manifest: Path, tmp_path: Path) -> None:
    text = "  traces: {endpoint: 'http://collector:4318'}\n  router: {traceRatio: 0.5}\n"
    manifest.write_text(TEXT + text)
    replica = read_manifest(manifest)
    write_parts(replica, tmp_path, RunFiles(tmp_path), record=None, log_level="info")
    router = json.loads((tmp_path / "router.json").read_text())
    assert (router["traces_endpoint"], router["traces_ratio"]) == ("http://collector:4318", 0.5)
    controller = json.loads((tmp_path / "controller.json").read_text())
    assert controller["spec"]["traces"]["endpoint"] == "http://collector:4318"


def test_a_run_directory_too_long_for_a_socket_is_refused(checkpoint_manifest: Path, tmp_path: Path) -> None:
    result = medha("up", checkpoint_manifest, "--port", "0", "--run-dir", tmp_path / ("long" * 30))
    assert result.exit_code == 2
    assert "too long for the path of a socket" in result.stderr


@pytest.mark.parametrize(
    ("host", "warns"),
    [("0.0.0.0", True), ("::", True), ("127.0.0.1", False), ("localhost", False), ("::1", False)],
)
def test_a_router_that_other_machines_reach_is_warned_of_once(
    checkpoint_manifest: Path, host: str, warns: bool
) -> None:
    checkpoint_manifest.write_text(TEXT + f'  router: {{host: "{host}", port: 0}}\n')
    result = medha(
        "up", checkpoint_manifest, "--record", "no/such/folder/events"
    )  # which ends it before anything starts
    assert result.exit_code == 2
    said = f"warning: router.host is {host}: anybody who reaches port"
    assert result.output.count(said) == warns, result.output
    assert ("asks for no key" in result.output) == warns


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medha_cli.up_command.supervise", lambda *_, **__: pytest.fail("parts were started"))


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_run_directory_that_others_can_write_to_is_refused(
    checkpoint_manifest: Path, tmp_path: Path, mode: int
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    run.chmod(mode)
    result = medha("up", checkpoint_manifest, "--port", "0", "--run-dir", run)
    assert result.exit_code == 2
    assert (
        f"--run-dir {run} has mode {mode & 0o777:04o}, so others can write there; chmod 700" in result.stderr
    )
    assert list(run.iterdir()) == []


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_run_directory_of_somebody_else_is_refused(checkpoint_manifest: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    os.chown(run, 65534, 65534)
    result = medha("up", checkpoint_manifest, "--port", "0", "--run-dir", run)
    assert result.exit_code == 2
    assert f"--run-dir {run} belongs to user 65534" in result.stderr
    assert list(run.iterdir()) == []


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            "kvCache: {tiers: {host: {size: 256Ti}}}",
            "spec.kvCache.tiers.host.size is 2.62e+05 GiB for each rank (of 1), but",
        ),
        ("kvCache: {size: 256Ti}", "spec.kvCache.size is 256Ti for each rank (of 1), but"),
        (
            "parallelism: {tensor: 3}",
            "parallelism.tensor is 3, which does not divide num_attention_heads (4)",
        ),
        ("parallelism: {stream: 5}", "parallelism.stream is 5, but the model has 2 layers"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(
    checkpoint_manifest: Path, spec: str, said: str
) -> None:
    checkpoint_manifest.write_text(f"{TEXT}  {spec}\n")
    result = medha("up", checkpoint_manifest, "--port", "0")
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_grid_of_more_ranks_than_memory_can_hold_is_refused(checkpoint_manifest: Path) -> None:
    checkpoint_manifest.write_text(f"{TEXT}  parallelism: {{tensor: 2, stream: 2, kv: 16}}\n")
    replica = read_manifest(checkpoint_manifest)
    require_possible(replica.spec, checkpoint_manifest.parent / "model", 16 * 2**30)
    said = r"spec.parallelism: 64 ranks \(tensor 2 x stream 2 x kv 16\) need at least 8.0\d GiB .* but 8 GiB are free"
    with pytest.raises(ConfigInvalid, match=said):
        require_possible(replica.spec, checkpoint_manifest.parent / "model", 8 * 2**30)


def test_the_directory_of_a_checkpoint_stands_for_a_manifest_that_names_it(
    checkpoint_manifest: Path, tmp_path: Path
) -> None:
    model = tmp_path / "Qwen3-8B_v2"
    model.symlink_to(checkpoint_manifest.parent / "model")
    replica = read_manifest(model)
    assert (replica.metadata.name, replica.spec.model.name) == ("qwen3-8b-v2", "Qwen3-8B_v2")
    assert model_directory(replica) == model


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    result = medha("up", tmp_path)
    assert result.exit_code == 2
    assert f"{tmp_path} is a directory without config.json" in result.stderr


@pytest.mark.parametrize("option", ["--record", "--trace"])
def test_a_log_that_cannot_be_written_is_named_before_anything_starts(
    option: str, checkpoint_manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medha_cli.up_command.supervise", lambda *_, **__: pytest.fail("parts were started"))
    result = medha("up", checkpoint_manifest, "--port", "0", option, tmp_path / "none" / "log.json")
    assert result.exit_code == 2
    assert f"{option} is {tmp_path}/none/log.json, whose folder does not exist" in result.stderr
    result = medha("up", checkpoint_manifest, "--port", "0", option, checkpoint_manifest)
    assert result.exit_code == 2
    assert checkpoint_manifest.read_text() == TEXT


ROUTER = {"maxBodyBytes": "1Mi", "allowedHosts": ["chat.example"], "allowedOrigins": ["https://chat.example"]}


def test_the_parts_get_what_the_manifest_declares(tmp_path: Path) -> None:
    replica = parse_replica(
        REPLICA | {"spec": REPLICA["spec"] | {"lifecycle": {"drainSeconds": 7}, "router": ROUTER}}
    )  # type: ignore[operator]
    groups = write_parts(replica, tmp_path, RunFiles(tmp_path), record=Path("events"), log_level="debug")
    assert [part.name for group in groups for part in group] == ["router", "controller", "rank 0"]
    router = json.loads((tmp_path / "router.json").read_text())
    controller = json.loads((tmp_path / "controller.json").read_text())
    rank = json.loads((tmp_path / "rank-0.json").read_text())
    assert (router["drain_seconds"], router["max_body_bytes"]) == (7, 2**20)
    assert (router["allowed_hosts"], router["allowed_origins"]) == (
        ["chat.example"],
        ["https://chat.example"],
    )
    assert router["scratch_directory"] == str(
        tmp_path
    )  # removed with the run, even after a router was killed
    assert controller["record_file"] == str(Path.cwd() / "events")
    assert controller["spec"] == rank["spec"] == replica.spec.model_dump(mode="json", by_alias=True)
    assert controller["routers"] == [
        {"control": router["control_endpoint"], "tokens": router["tokens_endpoint"]}
    ]
    assert {settings["log_level"] for settings in (router, controller, rank)} == {"debug"}


@pytest.mark.parametrize(
    ("has_gpu", "resources", "accelerator"),
    [
        (True, {}, "nvidia.com/gpu"),
        (False, {}, "none"),
        (True, {"resources": {"accelerator": "none"}}, "none"),
        (False, {"resources": {"accelerator": "nvidia.com/gpu"}}, "nvidia.com/gpu"),
    ],
)
def test_ranks_of_this_machine_compute_on_its_gpu_unless_the_manifest_names_another_device(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_gpu: bool,
    resources: dict[str, object],
    accelerator: str,
) -> None:
    monkeypatch.setattr("medha_cli.local_parts.has_nvidia_gpu", lambda: has_gpu)
    replica = parse_replica(REPLICA | {"spec": REPLICA["spec"] | resources})  # type: ignore[operator]
    write_parts(replica, tmp_path, RunFiles(tmp_path), record=None, log_level="info")
    assert json.loads((tmp_path / "rank-0.json").read_text())["accelerator"] == accelerator


def test_settings_of_each_part_are_what_that_part_reads(tmp_path: Path) -> None:
    from medha_process.part_settings import ControllerSettings, RankSettings
    from medha_process.router_settings import RouterSettings

    replica = parse_replica(REPLICA)
    write_parts(replica, tmp_path, RunFiles(tmp_path), record=None, log_level="info")
    RouterSettings.model_validate_json((tmp_path / "router.json").read_bytes())
    controller = ControllerSettings.model_validate_json((tmp_path / "controller.json").read_bytes())
    rank = RankSettings.model_validate_json((tmp_path / "rank-0.json").read_bytes())
    assert controller.spec == rank.spec == replica.spec


def test_the_router_knows_the_manifests_model_before_a_replica_has_joined_it(tmp_path: Path) -> None:
    """As after a restart of the router while the replica is down."""
    from medha_router.declared import DeclaredFiles

    replica = parse_replica(REPLICA | {"spec": REPLICA["spec"] | {"router": {"port": 0}}})  # type: ignore[operator]
    files = RunFiles(tmp_path)
    write_parts(replica, tmp_path, files, record=None, log_level="info")
    folder = json.loads((tmp_path / "router.json").read_text())["models_directory"]
    (model,) = DeclaredFiles(Path(folder)).changed() or ()
    assert (model.name, model.service_classes, model.replicas) == (replica.spec.model.name, ("default",), 1)
    command = [sys.executable, "-m", "medha_router", "--settings", str(tmp_path / "router.json")]
    with subprocess.Popen(command) as router:
        try:
            while not files.router_ready.exists():
                assert router.poll() is None
                time.sleep(0.05)
            client = openai.OpenAI(base_url=f"{files.url()}/v1", api_key="none", max_retries=0)
            with pytest.raises(openai.InternalServerError) as refused:
                client.completions.create(model=model.name, prompt="x")
            assert refused.value.status_code == 503
            assert int(refused.value.response.headers["retry-after"]) >= 1
            with pytest.raises(openai.NotFoundError):
                client.completions.create(model="wrong", prompt="x")
        finally:
            router.terminate()


def test_a_checkpoint_is_made_and_not_overwritten_without_force(tmp_path: Path) -> None:
    target = tmp_path / "tiny"
    assert medha("model", "init", target, "--preset", "tiny", "--seed", "3").exit_code == 0
    assert (target / "model.safetensors").is_file()
    refused = medha("model", "init", target)
    assert refused.exit_code == 2
    assert "is not empty" in refused.stderr
    assert medha("model", "init", target, "--force").exit_code == 0
    unknown = medha("model", "init", tmp_path / "other", "--preset", "giant")
    assert unknown.exit_code == 2
    assert "choose one of tiny, small" in unknown.stderr


def test_scales_of_keys_and_values_are_measured_and_checked_and_replaced_by_force_alone(
    tmp_path: Path,
) -> None:
    target, text = tmp_path / "tiny", tmp_path / "text.txt"
    text.write_text("The river rose, and people went to higher ground.")
    assert medha("model", "init", target).exit_code == 0
    made = medha("model", "kv-scales", target, "--tokens", "60")
    assert made.exit_code == 0, made.stderr
    assert "scales by 61 tokens (random tokens, seed 0)" in made.output
    before = (target / "kv_scales.safetensors").read_bytes()
    for arguments, said in (
        (["--text", text], "use --force to replace it"),
        (["--check", "--force"], "leave one of both out"),
        (["--check", "--seed", "1", "--text", text], "does not apply to --text"),
    ):
        refused = medha("model", "kv-scales", target, *arguments)
        assert refused.exit_code == 2
        assert said in refused.stderr
    checked = medha("model", "kv-scales", target, "--check", "--tokens", "60")
    assert checked.exit_code == 0, checked.stderr
    assert "values need up to 0.5 of what a scale holds" in checked.output
    assert "0 of 8 scales are too small" in checked.output
    assert (target / "kv_scales.safetensors").read_bytes() == before
    assert medha("model", "kv-scales", target, "--text", text, "--force").exit_code == 0
    scales = load_file(target / "kv_scales.safetensors")
    save_file({name: scale / 8 for name, scale in scales.items()}, target / "kv_scales.safetensors")
    assert medha("model", "kv-scales", target, "--text", text, "--check").exit_code == 1
    assert medha("model", "init", target, "--force").exit_code == 0
    assert not (target / "kv_scales.safetensors").exists(), "they are those of other weights"


def test_help_and_errors_of_manifests_come_without_loading_torch_or_the_web_server(manifest: Path) -> None:
    """The doors are lazy: `medha --help` must answer at once, and on a machine without the worker extra."""
    manifest.write_text("")
    code = (
        "import sys\nfrom medha_cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'zmq', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    for arguments in (["--help"], ["up", "--help"], ["model", "init", "--help"], ["up", str(manifest)]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_errors_are_red_only_in_a_terminal(tmp_path: Path) -> None:
    leader, follower = os.openpty()
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | {"TERM": "xterm"}
    argv = [sys.executable, "-m", "medha_cli.main", "up", str(tmp_path / "absent.yaml")]
    subprocess.run(argv, stderr=follower, check=False, env=environment)
    os.close(follower)
    assert b"\x1b[1;31merror:" in os.read(leader, 4096)
    os.close(leader)
    piped = subprocess.run(argv, capture_output=True, check=False, env=environment)
    assert piped.stderr.startswith(b"error: ")
