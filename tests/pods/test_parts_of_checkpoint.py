"""A replica whose pods each have only the files of their stage answers as one whose pods have the whole checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from .grid import Replica
from .hub import Hub
from .init_container import rendered, run

pytestmark = pytest.mark.timeout(240)
COMMIT = "c" * 40
INDEX = "model.safetensors.index.json"
PROMPTS = ["the quick brown fox jumps over the lazy dog and " * 20, "Hello"]
SCHEDULING = {"maxChunkTokens": 128, "longThresholdTokens": 400}


@pytest.fixture(scope="module")
def in_parts(checkpoint: Path) -> dict[str, bytes]:
    """The files of the checkpoint, with those of each layer's weights in a file of their own."""
    tensors = load_file(checkpoint / "model.safetensors")
    file_of = {
        name: f"model-{name.split('.')[2] if '.layers.' in name else name.split('.')[-2]}.safetensors"
        for name in tensors
    }
    folder = checkpoint.parent / "parts"
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in set(file_of.values()):
        save_file({name: tensors[name] for name in tensors if file_of[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": file_of}))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def hub(in_parts: dict[str, bytes]) -> Iterator[Hub]:
    found = Hub(in_parts, COMMIT)
    yield found
    found.close()


def answers(replica: Replica) -> list[str]:
    try:
        replica.start()
        replica.wait_ready()
        return [replica.complete(prompt) for prompt in PROMPTS]
    finally:
        replica.stop()


@pytest.mark.long
def test_pods_with_the_files_of_their_stage_answer_as_with_all_of_them(
    hub: Hub, in_parts: dict[str, bytes], checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "whole").mkdir()
    expected = answers(Replica(tmp_path / "whole", checkpoint, stages=2, lanes=1))

    (tmp_path / "parts").mkdir()
    replica = Replica(tmp_path / "parts", Path("/nowhere"), stages=2, lanes=1)
    fetching = rendered(COMMIT, 2, {"scheduling": SCHEDULING})
    weights: list[set[str]] = []
    for stage in (0, 1):
        folder = tmp_path / f"stage-{stage}"
        done = run(fetching, hub, folder, stage)
        assert done.returncode == 0, done.stderr
        pod = replica.pods[0, stage]
        pod.argv[pod.argv.index("--model") + 1] = str(folder / "model")
        weights.append({path.name for path in (folder / "model").glob("*.safetensors")})
    assert weights[0] | weights[1] == {name for name in in_parts if name.endswith(".safetensors")}
    assert not weights[0] & weights[1], "both have one, so that the answers prove less"
    assert answers(replica) == expected


def test_a_pod_that_lacks_a_file_of_its_stage_says_which_and_what_to_do(
    hub: Hub, in_parts: dict[str, bytes], tmp_path: Path
) -> None:
    fetching = rendered(COMMIT, 2, {"scheduling": SCHEDULING})
    assert run(fetching, hub, tmp_path / "stage-1", 1).returncode == 0
    folder = tmp_path / "stage-1" / "model"
    (folder / "model-lm_head.safetensors").unlink()
    (tmp_path / "replica").mkdir()
    replica = Replica(tmp_path / "replica", folder, stages=2, lanes=1)
    pod = replica.pods[0, 1]
    try:
        pod.start()
        assert pod.wait(60) != 0
    finally:
        replica.stop()
    assert f"{folder / 'model-lm_head.safetensors'} is missing; fetch the checkpoint again" in pod.message
