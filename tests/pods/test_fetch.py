"""The init container that fetches a model of the Hub: its command, as rendered, against a Hub of our own."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from medha.api.replica import MedhaReplicaSpec
from medha_operator.kube.kinds import Manifest
from medha_operator.operator_settings import OperatorSettings
from medha_operator.replica.manifests import Owner, pod_templates

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "rope_theta": 1e4, "torch_dtype": "float32",
    "hidden_act": "silu",
}  # fmt: skip
OTHERS = {name: name.encode() * 9 for name in ("tokenizer.json", "pytorch_model.bin", "original/a.pth")}
FILES = {"config.json": json.dumps(CONFIG).encode(), **OTHERS, "model.safetensors": b"weights"}
WEIGHT_MAP = {
    "model.embed_tokens.weight": SHARDS[0],
    "model.layers.0.mlp.up_proj.weight": SHARDS[0],
    "model.layers.1.mlp.up_proj.weight": SHARDS[1],
    "model.layers.2.mlp.up_proj.weight": SHARDS[1],
    "model.layers.3.mlp.up_proj.weight": SHARDS[2],
    "model.norm.weight": SHARDS[2],
    "lm_head.weight": SHARDS[2],
}
IN_PARTS = {
    "config.json": FILES["config.json"],
    **OTHERS,
    "model.safetensors.index.json": json.dumps({"weight_map": WEIGHT_MAP}).encode(),
    **{name: name.encode() for name in SHARDS},
}
TOKEN = "hf_of_a_secret"


class Hub:
    """Says what is in one repository, and gives its files to who has the token."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.asked: list[str] = []
        self.calls = 0
        self.damages = False  # whether weights change on the way
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._answer(with_body=False)

            def do_GET(self) -> None:
                self._answer(with_body=True)

            def _answer(self, *, with_body: bool) -> None:
                path = self.path.partition("?")[0]
                hub.calls += 1
                resolved = f"/team/model/resolve/{COMMIT}/"
                if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    self.send_error(401)
                elif path in {f"/api/models/team/model/revision/{name}" for name in ("v2", COMMIT)}:
                    siblings = [
                        {"rfilename": name, "size": len(content)}
                        | (
                            {
                                "lfs": {
                                    "sha256": hashlib.sha256(content).hexdigest(),
                                    "size": len(content),
                                    "pointerSize": 9,
                                }
                            }
                            if name.endswith(".safetensors")
                            else {}
                        )
                        for name, content in files.items()
                    ]
                    self._send(json.dumps({"id": "team/model", "sha": COMMIT, "siblings": siblings}).encode())
                elif path == f"/api/models/team/model/tree/{COMMIT}":
                    tree = [
                        {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                        for name, content in files.items()
                    ]
                    self._send(json.dumps(tree).encode())
                elif path.startswith(resolved) and path.removeprefix(resolved) in files:
                    name = path.removeprefix(resolved)
                    hub.asked += [name] * with_body
                    is_damaged = hub.damages and name.endswith(".safetensors")
                    self._send(files[name][::-1] if is_damaged else files[name], with_body=with_body)
                else:
                    self.send_error(404)

            def _send(self, content: bytes, *, with_body: bool = True) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
                self.send_header("X-Repo-Commit", COMMIT)
                self.end_headers()
                if with_body:
                    self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    found = Hub(FILES)
    yield found
    found.close()


@pytest.fixture
def hub_in_parts() -> Iterator[Hub]:
    found = Hub(IN_PARTS)
    yield found
    found.close()


def fetching(revision: str, stages: int = 1, **more: object) -> Manifest:
    """The init container of a replica's pods."""
    return pod(revision, stages, **more)["initContainers"][0]  # type: ignore[no-any-return]


def pod(revision: str, stages: int = 1, **more: object) -> Manifest:
    """The spec of a replica's pods in the first lane."""
    hub = {"repository": "team/model", "revision": revision, "tokenSecret": {"name": "hub", "key": "token"}}
    source = {"huggingFace": hub | more}
    spec = MedhaReplicaSpec.model_validate(
        {"model": {"name": "m", "source": source}, "parallelism": {"stream": stages}}
    )
    (template,) = pod_templates(Owner("m", "tests", "uid"), spec, "r", OperatorSettings())
    return dict(template["spec"])


def run(container: Manifest, hub: Hub, folder: Path, stage: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a container's command with its mounts below `folder` and nothing else of this user's."""
    mounts = {mount["mountPath"]: folder / mount["name"] for mount in container["volumeMounts"]}
    for path in mounts.values():
        path.mkdir(exist_ok=True)

    def placed(word: str) -> str:
        for mounted, path in mounts.items():
            if word == mounted or word.startswith(mounted + "/"):
                return str(path) + word.removeprefix(mounted)
        return word

    environment = {entry["name"]: placed(entry["value"]) for entry in container["env"] if "value" in entry}
    if "HF_TOKEN_PATH" in environment:
        Path(environment["HF_TOKEN_PATH"]).write_text(TOKEN + "\n")
    else:
        environment["HF_TOKEN"] = TOKEN
    bin_folder = str(Path(sys.executable).parent)
    return subprocess.run(
        [placed(word) for word in (*container["command"], *container["args"])],
        env={
            "PATH": f"{bin_folder}{os.pathsep}/usr/bin",
            "HOME": "/nonexistent",
            "HF_ENDPOINT": hub.url,
            "MEDHA_STAGE": str(stage),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        }
        | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_pod_fetches_what_its_ranks_read_and_no_other_weights(hub: Hub, tmp_path: Path) -> None:
    done = run(fetching("v2"), hub, tmp_path)
    assert done.returncode == 0, done.stderr
    pending = {"config.json", "tokenizer.json", "model.safetensors"}
    assert sorted(hub.asked) == sorted(pending)
    for name in pending:
        assert (tmp_path / "model" / name).read_bytes() == FILES[name]


@pytest.mark.parametrize(
    ("stages", "stage", "shards"),
    [
        (1, 0, SHARDS),
        (2, 0, SHARDS[:2]),
        (2, 1, SHARDS[1:]),
        (4, 0, SHARDS[:1]),
        (4, 2, SHARDS[1:2]),
        (4, 3, SHARDS[2:]),
    ],
)
def test_a_stage_fetches_the_files_of_its_layers_once(
    hub_in_parts: Hub, tmp_path: Path, stages: int, stage: int, shards: list[str]
) -> None:
    container = fetching("v2", stages)
    done = run(container, hub_in_parts, tmp_path, stage)
    assert done.returncode == 0, done.stderr
    whole = {"config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert sorted(hub_in_parts.asked) == sorted([*whole, *shards])
    assert {path.name for path in (tmp_path / "model").glob("*.safetensors")} == {*shards}
    assert f"stage {stage} of {stages} reads {len(shards)} files with weights" in done.stdout + done.stderr
    # A container that is restarted finds what is there.
    hub_in_parts.asked.clear()
    assert run(container, hub_in_parts, tmp_path, stage).returncode == 0
    assert hub_in_parts.asked == []


def test_a_revision_that_is_not_there_ends_the_init_container_with_words(hub: Hub, tmp_path: Path) -> None:
    done = run(fetching("v3"), hub, tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "spec.model.source.huggingFace: team/model at revision v3 cannot be fetched" in done.stderr, last


def test_an_unsupported_model_is_refused_before_its_weights_are_fetched(tmp_path: Path) -> None:
    config = json.dumps(CONFIG | {"architectures": ["MambaForCausalLM"]}).encode()
    hub = Hub(IN_PARTS | {"config.json": config})
    done = run(fetching("v2"), hub, tmp_path)
    hub.close()
    assert done.returncode == 1
    assert "MambaForCausalLM" in done.stderr
    assert not any(name.endswith(".safetensors") for name in hub.asked)


def test_a_file_that_the_index_names_and_nobody_has_is_named(tmp_path: Path) -> None:
    hub = Hub({name: content for name, content in IN_PARTS.items() if name != SHARDS[1]})
    done = run(fetching("v2"), hub, tmp_path)
    hub.close()
    assert done.returncode == 1
    assert f"has no file {SHARDS[1]}" in done.stderr


def test_pods_share_downloads_in_a_cache(hub_in_parts: Hub, tmp_path: Path) -> None:
    """Both stages begin at once; then a pod that is replaced downloads nothing, though its own volumes are new."""
    cache = {"claimName": "models"}
    container = fetching(COMMIT, 2, cache=cache)
    volume = tmp_path / "claim"
    volume.mkdir()

    def start(name: str, stage: int) -> subprocess.CompletedProcess[str]:
        own = tmp_path / name
        own.mkdir()
        (own / "model").symlink_to(volume)
        return run(container, hub_in_parts, own, stage)

    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(start, ("first", "second"), (0, 1)):
            assert done.returncode == 0, done.stderr
    assert sorted(set(hub_in_parts.asked)) == sorted(
        IN_PARTS.keys() - {"pytorch_model.bin", "original/a.pth"}
    )
    assert len(hub_in_parts.asked) == len(set(hub_in_parts.asked)), "a file was fetched twice"
    hub_in_parts.calls = 0
    assert start("again", 1).returncode == 0
    assert hub_in_parts.calls == 0, "a commit that is there needs no Hub"

    spec = pod(COMMIT, 2, cache=cache)
    (claim,) = (one for one in spec["volumes"] if one["name"] == "model")
    assert claim["persistentVolumeClaim"] == {"claimName": "models"}
    (mount,) = (one for one in spec["containers"][0]["volumeMounts"] if one["name"] == "model")
    assert mount["readOnly"]
    for name, content in IN_PARTS.items():
        if name not in ("pytorch_model.bin", "original/a.pth"):
            assert (volume / mount["subPath"] / name).read_bytes() == content


def test_a_file_of_a_cache_that_has_another_size_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    container = fetching(COMMIT, cache={"claimName": "models"})
    assert run(container, hub, tmp_path).returncode == 0
    (weights,) = (tmp_path / "model").rglob("model.safetensors")
    weights.write_bytes(b"wei")
    hub.asked.clear()
    done = run(container, hub, tmp_path)
    assert done.returncode == 0, done.stderr
    assert weights.read_bytes() == FILES["model.safetensors"]


def test_a_file_that_differs_from_the_hubs_digest_is_not_kept(hub: Hub, tmp_path: Path) -> None:
    hub.damages = True
    done = run(fetching(COMMIT), hub, tmp_path)
    assert done.returncode == 1
    assert "model.safetensors was damaged on the way" in done.stderr
    assert not (tmp_path / "model" / "model.safetensors").exists()
    hub.damages = False
    assert run(fetching(COMMIT), hub, tmp_path).returncode == 0
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_a_hub_that_does_not_answer_is_an_error_with_its_reason(tmp_path: Path) -> None:
    hub = Hub(FILES)
    hub.close()
    done = run(fetching("v2"), hub, tmp_path)
    assert done.returncode == 1
    assert "team/model at revision v2 cannot be fetched" in done.stderr
    assert "Traceback" not in done.stderr
