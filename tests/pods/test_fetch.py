"""The init container that fetches a model of the Hub, against a Hub of our own: what it asks for, and what it keeps."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from medha_worker.pod.fetch_model import Progress, volume_fault
from medha_worker.pod.fetched_files import LEFT_SECONDS, Digest, FetchedFiles, HubFile, Listing

from .grid import eventually
from .hub import Hub
from .init_container import Rendered, command, rendered, run

KV_SCALES = "kv_scales.safetensors"
COMMIT, NEXT_COMMIT = "0123456789abcdef0123456789abcdef01234567", "f" * 40
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "rope_theta": 1e4, "torch_dtype": "float32",
    "hidden_act": "silu",
}  # fmt: skip
SMALL = {
    "config.json": json.dumps(CONFIG).encode(),
    **{
        name: name.encode() * 9
        for name in (
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
        )
    },
}
OTHERS = {
    name: name.encode() * 9
    for name in ("pytorch_model.bin", "original/a.pth", "README.md", ".gitattributes", "extra.safetensors")
}
FILES = {**SMALL, **OTHERS, "model.safetensors": b"weights"}
WEIGHT_MAP = {
    "model.embed_tokens.weight": SHARDS[0],
    "model.layers.0.mlp.up_proj.weight": SHARDS[0],
    "model.layers.1.mlp.up_proj.weight": SHARDS[1],
    "model.layers.2.mlp.up_proj.weight": SHARDS[1],
    "model.layers.3.mlp.up_proj.weight": SHARDS[2],
    "model.norm.weight": SHARDS[2],
    "lm_head.weight": SHARDS[2],
}
INDEXED = SMALL | {"model.safetensors.index.json": json.dumps({"weight_map": WEIGHT_MAP}).encode()}
IN_PARTS = INDEXED | OTHERS | {name: name.encode() for name in SHARDS}
CLAIM = {"claimName": "models"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    found = Hub(dict(FILES), COMMIT)
    yield found
    found.close()


@pytest.fixture
def hub_in_parts() -> Iterator[Hub]:
    found = Hub(dict(IN_PARTS), COMMIT)
    yield found
    found.close()


@pytest.fixture
def no_hub() -> Hub:
    """An address at which nobody answers any more."""
    found = Hub({}, COMMIT)
    found.close()
    return found


def fetched(replica: Rendered, hub: Hub, folder: Path, stage: int = 0, **environment: str) -> str:
    """Run a container that succeeds; return its log."""
    done = run(replica, hub, folder, stage, **environment)
    assert done.returncode == 0, done.stderr
    return done.stderr


def failed(replica: Rendered, hub: Hub, folder: Path, stage: int = 0, **environment: str) -> str:
    """Run a container that fails; return the reason that it leaves for the kubelet, which also ends its log."""
    reason = folder / "termination-log"
    reason.touch()
    options = ["--termination-log", str(reason)]
    done = run(replica, hub, folder, stage, options=options, **environment)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.endswith(f" ERROR medha.fetch: {reason.read_text()}\n")
    return reason.read_text()


def own_volumes(shared: Path, folder: Path) -> Path:
    """Return the folder of a new pod, whose volume `model` is one that pods share."""
    folder.mkdir()
    (folder / "model").symlink_to(shared)
    return folder


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


# --- what is asked for ------------------------------------------------------------------------------------


def test_a_pod_fetches_what_it_reads_and_nothing_else(hub: Hub, tmp_path: Path) -> None:
    """Scales of keys and values are among it, which every stage reads if the repository has them."""
    hub.files[KV_SCALES] = b"scales"
    fetched(rendered("v2"), hub, tmp_path)
    assert sorted(hub.asked) == sorted([*SMALL, KV_SCALES, "model.safetensors"])
    for name in hub.asked:
        assert (tmp_path / "model" / name).read_bytes() == hub.files[name]


@pytest.mark.parametrize(
    ("stages", "stage", "shards"),
    [
        (2, 0, SHARDS[:2]),
        (4, 2, SHARDS[1:2]),
        *(
            pytest.param(stages, stage, shards, marks=pytest.mark.long)
            for stages, stage, shards in (
                (1, 0, SHARDS),
                (2, 1, SHARDS[1:]),
                (4, 0, SHARDS[:1]),
                (4, 3, SHARDS[2:]),
            )
        ),
    ],
)
def test_a_stage_fetches_the_files_of_its_layers_once(
    hub_in_parts: Hub, tmp_path: Path, stages: int, stage: int, shards: list[str]
) -> None:
    replica = rendered("v2", stages)
    log = fetched(replica, hub_in_parts, tmp_path, stage)
    assert sorted(hub_in_parts.asked) == sorted([*INDEXED, *shards])
    assert {path.name for path in (tmp_path / "model").glob("*.safetensors")} == {*shards}
    assert f"stage {stage} of {stages} reads {len(shards)} files with weights" in log
    # A container that is restarted finds what is there.
    hub_in_parts.asked.clear()
    fetched(replica, hub_in_parts, tmp_path, stage)
    assert hub_in_parts.asked == []


@pytest.mark.long
def test_a_model_that_only_the_spec_makes_servable_is_fetched(tmp_path: Path) -> None:
    """A window that the family does not have does not bind prompts that are shorter."""
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "sliding_window": 128}
    hub = Hub(FILES | {"config.json": json.dumps(CONFIG | llama).encode()}, COMMIT)
    said = failed(rendered("v2"), hub, tmp_path)
    assert "sliding_window" in said
    assert "model.safetensors" not in hub.asked
    source = {"huggingFace": {"repository": "team/model", "revision": "v2", "tokenSecret": {"name": "hub"}}}
    short = rendered("v2", spec={"model": {"name": "m", "maxModelLen": 128, "source": source}})
    fetched(short, hub, tmp_path)
    hub.close()
    assert "model.safetensors" in hub.asked


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("config.json", CONFIG | {"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "quant_algo is 'FP8'"),
    ],
)
def test_an_unsupported_model_is_refused_before_its_weights_are_fetched(
    name: str, content: dict[str, Any], named: str, tmp_path: Path
) -> None:
    hub = Hub(IN_PARTS | {name: json.dumps(content).encode()}, COMMIT)
    assert named in failed(rendered("v2"), hub, tmp_path)
    hub.close()
    assert not any(name.endswith(".safetensors") for name in hub.asked)


def test_a_revision_that_is_not_there_ends_the_init_container_with_words(hub: Hub, tmp_path: Path) -> None:
    said = failed(rendered("v3"), hub, tmp_path)
    assert said.startswith(
        "ConfigInvalid: spec.model.source.huggingFace: team/model at revision v3 cannot be fetched"
    )


@pytest.mark.parametrize("missing", [SHARDS[1], "model.safetensors"])
def test_weights_that_nobody_has_are_named(tmp_path: Path, missing: str) -> None:
    files = IN_PARTS if missing in SHARDS else FILES
    hub = Hub({name: content for name, content in files.items() if name != missing}, COMMIT)
    said = failed(rendered("v2"), hub, tmp_path)
    hub.close()
    assert f"team/model at {COMMIT} has no file {missing}" in said


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "..", "original/a.safetensors", "/outside.safetensors"]
)
def test_weights_in_other_folders_are_refused_even_if_the_hub_has_them(tmp_path: Path, name: str) -> None:
    index = json.dumps({"weight_map": dict.fromkeys(WEIGHT_MAP, name)}).encode()
    hub = Hub(SMALL | {"model.safetensors.index.json": index, name: b"weights"}, COMMIT)
    said = failed(rendered("v2"), hub, tmp_path)
    hub.close()
    assert said.startswith("CheckpointInvalid: ")
    assert f"weights must be in the repository's own folder, but its index names {name}" in said
    assert name not in hub.asked


def test_the_log_says_what_is_fetched_and_how_much_of_it_has_arrived(hub: Hub, tmp_path: Path) -> None:
    hub.files["model.safetensors"] = bytes(3 * 2**20)
    log = fetched(rendered("v2"), hub, tmp_path)
    lines = [line.partition(" INFO medha.fetch: ")[2] for line in log.splitlines()]
    assert all(lines), f"others write to the log, too: {log}"
    assert lines[-3:] == [
        f"fetching 1 files (3.0 MiB) of team/model at {COMMIT}: model.safetensors",
        "fetched 100 %: 3.0 MiB of 3.0 MiB",
        "all of them are there, as the Hub has them",
    ]


def test_progress_is_told_in_steps_of_five_percent_and_never_beyond_the_whole() -> None:
    lines: list[str] = []
    progress = Progress(200 * 2**20, lines.append)
    for _ in range(1000):
        progress.add(2**20 / 4)
    assert len(lines) == 20
    assert lines[0] == "fetched 5 %: 10.0 MiB of 200.0 MiB"
    assert lines[-1].startswith("fetched 100 %")


# --- what pods share --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [CLAIM, {"hostPath": "/var/cache/medha-models"}])
def test_pods_share_downloads_in_a_cache(
    hub_in_parts: Hub, tmp_path: Path, shared: Path, cache: dict[str, str]
) -> None:
    """Both stages begin at once; then a pod that is replaced downloads nothing, though its own volumes are new."""
    replica = rendered(COMMIT, 2, cache=cache)
    folders = [own_volumes(shared, tmp_path / name) for name in ("first", "second", "again")]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda stage: fetched(replica, hub_in_parts, folders[stage], stage), (0, 1)))
    assert sorted(hub_in_parts.asked) == sorted([*INDEXED, *SHARDS]), "one was fetched twice, or not at all"
    hub_in_parts.calls = 0
    fetched(replica, hub_in_parts, folders[2], 1)
    assert hub_in_parts.calls == 0, "a commit that is there needs no Hub"
    assert replica.model_mount["readOnly"]
    for name in (*INDEXED, *SHARDS):
        assert (shared / replica.model_mount["subPath"] / name).read_bytes() == IN_PARTS[name]


def test_the_volume_of_a_cache_is_the_one_that_the_spec_names() -> None:
    assert rendered(COMMIT, cache=CLAIM).model_volume["persistentVolumeClaim"] == CLAIM
    node = rendered(COMMIT, cache={"hostPath": "/var/cache/medha-models"}).model_volume
    assert node["hostPath"] == {"path": "/var/cache/medha-models", "type": "Directory"}
    assert rendered(COMMIT).model_volume["emptyDir"] == {}


@pytest.mark.long
def test_a_pod_waits_for_a_file_that_another_one_fetches_and_fetches_others_meanwhile(
    hub_in_parts: Hub, tmp_path: Path, shared: Path
) -> None:
    replica, common, last = rendered(COMMIT, 2, cache=CLAIM), SHARDS[1], SHARDS[2]
    hub_in_parts.paused[common] = Event()
    first = own_volumes(shared, tmp_path / "first")
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(fetched, replica, hub_in_parts, first, 0)
        eventually("the first asks for the file", lambda: common in hub_in_parts.asked)
        two = pool.submit(fetched, replica, hub_in_parts, own_volumes(shared, tmp_path / "second"), 1)
        eventually("the second has its other file", lambda: bool(list(shared.rglob(f"{last}.json"))))
        assert not (shared / replica.model_mount["subPath"] / common).exists(), "half a file can be seen"
        hub_in_parts.paused[common].set()
        assert f"another pod fetches {common} into the same folder; waiting for it" in two.result(60)
        one.result(60)
    assert hub_in_parts.asked.count(common) == 1


def test_a_container_that_is_killed_keeps_the_files_that_it_had(hub_in_parts: Hub, tmp_path: Path) -> None:
    replica = rendered(COMMIT)
    hub_in_parts.paused[SHARDS[2]] = Event()
    argv, environment = command(replica, hub_in_parts, tmp_path, 0)
    with subprocess.Popen(argv, env=environment, stderr=subprocess.DEVNULL) as container:
        eventually(
            "two files are there",
            lambda: all(list(tmp_path.rglob(f"{name}.json")) for name in SHARDS[:2]),
        )
        container.kill()
    hub_in_parts.paused[SHARDS[2]].set()
    hub_in_parts.asked.clear()
    fetched(replica, hub_in_parts, tmp_path)
    assert hub_in_parts.asked == SHARDS[2:]


@pytest.mark.long
def test_parts_that_a_killed_container_has_left_are_removed_when_they_are_old(
    hub: Hub, tmp_path: Path
) -> None:
    replica = rendered(COMMIT)
    hub.paused["model.safetensors"] = Event()
    argv, environment = command(replica, hub, tmp_path, 0)
    with subprocess.Popen(argv, env=environment, stderr=subprocess.DEVNULL) as container:
        eventually("it arrives", lambda: "model.safetensors" in hub.asked)
        container.kill()
    hub.paused["model.safetensors"].set()
    (left,) = tmp_path.rglob("*.incomplete")
    fetched(replica, hub, tmp_path)
    assert left.exists(), "where locks do not reach, another pod may still write it"
    old = left.stat().st_mtime - LEFT_SECONDS - 60
    os.utime(left, (old, old))
    fetched(replica, hub, tmp_path)
    assert not left.exists()


def test_what_arrives_counts_as_space_even_if_it_has_arrived_meanwhile(shared: Path) -> None:
    (shared / "a.incomplete").write_bytes(bytes(7))
    (shared / "b.incomplete").symlink_to("arrived")  # was listed, and is gone
    assert FetchedFiles(shared).arriving_bytes() == 7


def test_pods_with_the_same_host_name_and_process_id_keep_their_listings_beside_each_other(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, rename = FetchedFiles(shared), Path.rename
    files.prepare()

    def overtaken(path: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        files.keep_listing(Listing(revision="v2", commit=NEXT_COMMIT, files={}))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", overtaken)
    files.keep_listing(Listing(revision="v2", commit=COMMIT, files={}))
    found = files.listing()
    assert found is not None
    assert found.commit == COMMIT
    assert not list(shared.rglob("*.partial"))


def test_a_proof_is_none_for_a_file_that_another_pod_has_just_removed(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, wanted = FetchedFiles(shared), HubFile(size_bytes=7, digest=None)
    files.prepare()
    (shared / "a").write_bytes(bytes(7))
    assert files.compare("a", wanted) is None
    assert files.is_proven("a", wanted)
    monkeypatch.setattr(Path, "is_file", lambda _: True)  # it still was when it was asked
    (shared / "a").unlink()
    assert not files.is_proven("a", wanted)


# --- what is compared -------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"wei", b"Weights"], ids=["shorter", "another"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_of_a_cache_that_has_changed_is_fetched_again(
    hub: Hub, tmp_path: Path, name: str, content: bytes
) -> None:
    replica = rendered(COMMIT, cache=CLAIM)
    fetched(replica, hub, tmp_path)
    (path,) = (tmp_path / "model").rglob(name)
    path.write_bytes(content.ljust(len(FILES[name]) if content == b"Weights" else 0))
    hub.asked.clear()
    log = fetched(replica, hub, tmp_path)
    assert f"{path} is not as the Hub has it" in log
    assert path.read_bytes() == FILES[name]
    assert hub.asked == [name]


@pytest.mark.long
def test_a_file_that_was_only_touched_is_compared_and_kept(hub: Hub, tmp_path: Path) -> None:
    replica = rendered(COMMIT)
    fetched(replica, hub, tmp_path)
    os.utime(tmp_path / "model" / "model.safetensors", (0, 0))
    hub.asked.clear()
    assert "not as the Hub has it" not in fetched(replica, hub, tmp_path)
    assert hub.asked == []


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_file_that_is_damaged_on_the_way_is_fetched_again(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.damages[name] = 1
    assert f"{name} was damaged on the way: its " in fetched(rendered("v2"), hub, tmp_path)
    assert hub.asked.count(name) == 2
    assert (tmp_path / "model" / name).read_bytes() == FILES[name]


@pytest.mark.long
def test_a_file_that_is_damaged_each_time_is_not_kept(hub: Hub, tmp_path: Path) -> None:
    hub.damages["model.safetensors"] = 2
    said = failed(rendered(COMMIT), hub, tmp_path)
    assert said.startswith(
        "CheckpointInvalid: model.safetensors was damaged on the way 2 times: its sha256 is "
    )
    assert not (tmp_path / "model" / "model.safetensors").exists()
    fetched(rendered(COMMIT), hub, tmp_path)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == FILES["model.safetensors"]


# --- without a Hub, and when a branch moves ---------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    "offline",
    [pytest.param({}, id="down"), pytest.param({"HF_HUB_OFFLINE": "1"}, id="offline")],
)
def test_a_full_cache_of_a_commit_needs_no_hub(
    hub_in_parts: Hub, no_hub: Hub, tmp_path: Path, offline: dict[str, str]
) -> None:
    replica = rendered(COMMIT, 2, cache=CLAIM)
    said = failed(replica, no_hub, tmp_path, **offline)
    assert "spec.model.source.huggingFace: team/model at revision" in said
    assert "because the Hub does not give it" in said
    fetched(replica, hub_in_parts, tmp_path)
    fetched(replica, no_hub, tmp_path, **offline)
    said = failed(replica, no_hub, tmp_path, 1, **offline)  # the other stage needs one file more
    assert "because the Hub does not give it" in said


@pytest.mark.parametrize("offline", [{}, {"HF_HUB_OFFLINE": "1"}], ids=["down", "offline"])
def test_a_branch_is_taken_as_it_was_if_the_hub_does_not_answer(
    hub: Hub, no_hub: Hub, tmp_path: Path, offline: dict[str, str]
) -> None:
    fetched(rendered("v2"), hub, tmp_path)
    log = fetched(rendered("v2"), no_hub, tmp_path, **offline)
    assert "the Hub does not answer" in log
    assert f"going on with commit {COMMIT}, which revision v2 named before" in log
    assert "revision other cannot be fetched" in failed(rendered("other"), no_hub, tmp_path, **offline)


@pytest.mark.long
def test_a_branch_that_has_moved_costs_the_files_that_differ(hub_in_parts: Hub, tmp_path: Path) -> None:
    fetched(rendered("v2"), hub_in_parts, tmp_path)
    hub_in_parts.commit, hub_in_parts.files[SHARDS[1]] = NEXT_COMMIT, b"trained on"
    hub_in_parts.asked.clear()
    fetched(rendered("v2"), hub_in_parts, tmp_path)
    assert hub_in_parts.asked == [SHARDS[1]]
    assert (tmp_path / "model" / SHARDS[1]).read_bytes() == b"trained on"
    hub_in_parts.commit = COMMIT
    hub_in_parts.files = dict(FILES)  # one file, and no index
    fetched(rendered("v2"), hub_in_parts, tmp_path)
    assert not (tmp_path / "model" / "model.safetensors.index.json").exists(), "ranks would read by it"


@pytest.mark.long
def test_only_a_file_that_was_fetched_is_removed_if_the_repository_has_it_no_more(
    hub: Hub, tmp_path: Path
) -> None:
    """Scales that an operator has measured for a checkpoint may lie beside it."""
    scales = tmp_path / "model" / KV_SCALES
    fetched(rendered("v2"), hub, tmp_path)
    scales.write_bytes(b"measured")
    fetched(rendered("v2"), hub, tmp_path)
    assert scales.read_bytes() == b"measured"
    scales.unlink()
    hub.files[KV_SCALES] = b"published"
    fetched(rendered("v2"), hub, tmp_path)
    del hub.files[KV_SCALES]
    os.utime(scales, (0, 0))  # as in a copy of the folder
    fetched(rendered("v2"), hub, tmp_path)
    assert not scales.exists()


@pytest.mark.parametrize("digest", [None, Digest(kind="sha256", value=sha256(b"fetched").hexdigest())])
def test_a_file_that_somebody_put_over_a_fetched_one_is_not_removed(
    digest: Digest | None, shared: Path
) -> None:
    files = FetchedFiles(shared)
    files.prepare()
    for content, is_kept in ((b"fetched", False), (b"measured", True)):
        (shared / KV_SCALES).write_bytes(b"fetched")
        assert files.compare(KV_SCALES, HubFile(size_bytes=7, digest=digest)) is None
        (shared / KV_SCALES).write_bytes(content)
        files.remove(KV_SCALES)
        assert (shared / KV_SCALES).exists() is is_kept
        files.remove(KV_SCALES)
        assert (shared / KV_SCALES).exists() is is_kept


# --- volumes that cannot hold it --------------------------------------------------------------------------


def test_a_volume_that_is_too_small_is_reported_before_weights_are_fetched(hub: Hub, tmp_path: Path) -> None:
    hub.sizes["model.safetensors"] = 2**60
    said = failed(rendered(COMMIT, cache=CLAIM), hub, tmp_path)
    assert said.startswith("ConfigInvalid: spec.model.source.huggingFace: the volume of ")
    assert "is full" in said
    assert "1099511627776.0 MiB are missing" in said
    assert "model.safetensors" not in hub.asked


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ENOSPC, "the volume of /model is full"),
        (errno.EDQUOT, "the volume of /model is full"),
        (errno.EROFS, "huggingFace.cache: /model cannot be written by uid"),
        (errno.EACCES, "huggingFace.cache: /model cannot be written by uid"),
        (errno.ENOLCK, "huggingFace.cache: the volume of /model has no file locks"),
        (errno.ESTALE, "the volume of /model does not answer as expected"),
        (errno.ECONNRESET, None),
        (errno.ENOENT, None),
    ],
)
def test_faults_of_the_volume_are_told_from_those_of_the_network(code: int, said: str | None) -> None:
    found = volume_fault(OSError(code, os.strerror(code)), Path("/model"))
    assert (found is None) if said is None else (found is not None and said in found)


def test_a_fault_that_names_a_file_of_the_volume_is_one_of_the_volume() -> None:
    gone = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/model/.medha/config.json.lock")
    found = volume_fault(gone, Path("/model"))
    assert found is not None
    assert "the volume of /model does not answer as expected" in found
    assert volume_fault(gone, Path("/models")) is None


def test_a_volume_that_becomes_full_while_files_arrive_is_named_and_left_tidy(
    hub: Hub, tmp_path: Path
) -> None:
    hub.files["model.safetensors"] = bytes(8 * 2**20)
    hub.sizes["model.safetensors"] = 1  # so that it seems to fit
    volume = tmp_path / "model"
    volume.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(volume)], check=False)
    if mounted.returncode != 0:
        pytest.skip("only a privileged root can mount a small volume")
    try:
        said = failed(rendered(COMMIT, cache=CLAIM), hub, tmp_path)
        left = {path.name for path in volume.rglob("*")}
    finally:
        subprocess.run(["umount", str(volume)], check=True)
    assert said.startswith("ConfigInvalid: spec.model.source.huggingFace: the volume of ")
    assert "is full" in said
    assert "tokenizer.json" in left
    assert not any(name.endswith((".incomplete", ".partial", ".safetensors")) for name in left)


# Runs the command as root once, so that all modules are imported, and then as the user that the arguments name.
AS_USER = """
import os, sys
from medha_worker.pod.fetch_model import main
from medha_process import part_process
user, warm, target = int(sys.argv[1]), sys.argv[2], sys.argv[3]
main(["--replica", sys.argv[4], "--to", warm], standalone_mode=False)
os.setgid(user)
os.setuid(user)
main(["--replica", sys.argv[4], "--to", target], standalone_mode=False)
"""


@pytest.mark.parametrize("prepared", [True, False])
def test_the_user_of_pods_fills_a_directory_that_is_made_as_the_docs_say(
    hub: Hub, tmp_path: Path, prepared: bool
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    replica = rendered(COMMIT, cache={"hostPath": "/var/cache/medha-models"})
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        directory = Path(place) / "medha-models"
        owner = ["-o", "65532", "-g", "65532"] if prepared else []
        subprocess.run(["install", "-d", *owner, str(directory)], check=True)
        environment = command(replica, hub, tmp_path, 0)[1]
        document = Path(place) / "replica.json"
        document.write_text(replica.replica_json)
        done = subprocess.run(
            [sys.executable, "-c", AS_USER, "65532", str(tmp_path / "warm"), str(directory / "medha" / "m"), str(document)],
            env=environment | {"HF_TOKEN": Path(environment["HF_TOKEN_PATH"]).read_text().strip(), "HF_HOME": place},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )  # fmt: skip
        last = done.stderr.strip().splitlines()[-1]
        if prepared:
            assert done.returncode == 0, done.stderr
            (found,) = directory.rglob("model.safetensors")
            assert found.stat().st_uid == 65532
        else:
            assert done.returncode == 1
            assert last.partition(" ERROR medha.fetch: ")[2].startswith(
                "ConfigInvalid: spec.model.source.huggingFace.cache: "
            )
            assert "cannot be written by uid 65532" in last
