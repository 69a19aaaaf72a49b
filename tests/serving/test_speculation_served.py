"""A replica that guesses tokens answers as one that does not, and its record replays to the same decisions."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from safetensors.torch import load_file, save_file

from medha_worker.checkpoints.eagle3_preset import init_eagle3
from medha_worker.checkpoints.presets import init_checkpoint
from worker.eagle3_reference import make_always_right, make_target_forget

from .conftest import MODEL, Served, free_port, start, stop, write_manifest
from .test_failures import processes, streamed, text_pieces

REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 150},
    {"temperature": 0, "max_tokens": 150, "ignore_eos": True, "logprobs": 2},
    {"temperature": 0.7, "seed": 4, "max_tokens": 100, "n": 3, "frequency_penalty": 0.2},
    {"temperature": 0.3, "seed": 5, "max_tokens": 100, "repetition_penalty": 0.8, "min_tokens": 20},
    {"temperature": 0, "max_tokens": 100, "stop": ["a", "e"], "min_tokens": 5},
    {"temperature": 0.2, "seed": 6, "max_tokens": 120, "guided_regex": "(ab|ac){10,30}"},
    {"temperature": 0, "max_tokens": 60, "logit_bias": {"40": 30, "41": 30}},
]


def answers(served: Served) -> list[Any]:
    found = []
    for number, fields in enumerate(REQUESTS):
        body = {"model": MODEL, "prompt": "one two three " * (2 + number), **fields}
        response = httpx.post(served.url + "/v1/completions", json=body, timeout=120)
        response.raise_for_status()
        document = response.json()
        choices = [(one["text"], one["finish_reason"], one["logprobs"]) for one in document["choices"]]
        found.append((choices, document["usage"]))
    return found


def counted(served: Served, name: str) -> float:
    (value,) = re.findall(rf"^{name}_total (\S+)$", served.controller_page(), re.MULTILINE)
    return float(value)


def small(checkpoint: Path, folder: Path, *options: str, **spec: object) -> Served:
    """Start a replica that warms up quickly."""
    port = free_port()
    scheduling = {"maxChunkTokens": 256, "maxRunning": 16, **spec.pop("scheduling", {})}  # type: ignore[dict-item]
    manifest = write_manifest(
        folder / f"{port}.yaml", checkpoint, port,
        model={"name": MODEL, "source": {"path": str(checkpoint)}, "maxModelLen": 1024},
        kvCache={"size": "16Mi", "tokensPerLane": 64}, scheduling=scheduling, serviceClasses=[{"name": "default", "tpotTargetSeconds": 5}], **spec,
    )  # fmt: skip
    return start(manifest, port, checkpoint, *options)


@pytest.fixture(scope="module")
def expected(served: Served) -> list[Any]:
    """The answers of a replica that does not guess."""
    return answers(served)


@pytest.fixture(scope="module")
def drafts(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Draft models: the served model itself, and one that knows nothing of its texts."""
    other = tmp_path_factory.mktemp("drafts") / "other"
    init_checkpoint(other, preset="tiny", seed=9)
    config = json.loads((other / "config.json").read_text())
    served = json.loads((checkpoint / "config.json").read_text())
    (other / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": served["max_position_embeddings"]})
    )
    return {"itself": checkpoint, "another": other}


def drafting(directory: Path) -> dict[str, Any]:
    return {"method": "draftModel", "draftModel": {"path": str(directory)}, "maxDraftTokens": 3}


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for (choices, usage), (as_choices, as_usage) in zip(found, expected, strict=True):
        assert usage["completion_tokens"] == as_usage["completion_tokens"]
        for (text, reason, logprobs), (as_text, as_reason, as_logprobs) in zip(
            choices, as_choices, strict=True
        ):
            assert (text, reason) == (as_text, as_reason)
            assert (logprobs is None) == (as_logprobs is None)
            if logprobs is not None:
                assert logprobs["tokens"] == as_logprobs["tokens"]
                near = pytest.approx(as_logprobs["token_logprobs"], abs=1e-3)
                assert logprobs["token_logprobs"] == near


@pytest.mark.parametrize(
    ("method", "shape"),
    [
        pytest.param("promptLookup", {}, marks=pytest.mark.long),
        pytest.param("itself", {}, marks=pytest.mark.long),
        pytest.param("another", {}, marks=pytest.mark.long),
        pytest.param("promptLookup", {"stream": 2, "kv": 2}, marks=pytest.mark.long),
        pytest.param("itself", {"tensor": 2, "stream": 2}, marks=pytest.mark.long),
        pytest.param("itself", {"tensor": 2, "kv": 2}, marks=pytest.mark.long),
    ],
    ids=[
        "prompt lookup",
        "its own draft",
        "another draft",
        "prompt lookup on a grid",
        "its own draft on a grid",
        "its own draft on lanes",
    ],
)
def test_answers_are_those_of_a_replica_that_does_not_guess(
    checkpoint: Path,
    tmp_path: Path,
    drafts: dict[str, Path],
    expected: list[Any],
    method: str,
    shape: dict[str, int],
) -> None:
    record = tmp_path / "record.jsonl"
    speculation = drafting(drafts[method]) if method in drafts else {"method": method, "maxDraftTokens": 6}
    scheduling = {"speculation": speculation}
    guessing = small(checkpoint, tmp_path, "--record", str(record), scheduling=scheduling, parallelism=shape)
    try:
        found = answers(guessing)
        drafted, accepted = (
            counted(guessing, name) for name in ("medha_drafted_tokens", "medha_accepted_draft_tokens")
        )
        guessing.wait_idle()
        assert guessing.interrupt() == 0
    finally:
        stop(guessing)
    assert_same(found, expected)
    if method in drafts:  # how much is proposed depends on the time that it takes
        assert "a guess of the draft model takes" in "".join(guessing.lines)
        assert drafted >= accepted
    else:
        assert drafted > accepted > 0
    assert_replays(record)


@pytest.mark.long
def test_a_rank_that_is_killed_comes_back_with_its_draft_model_and_streams_go_on(
    served: Served, checkpoint: Path, tmp_path: Path, drafts: dict[str, Path], expected: list[Any]
) -> None:
    """Streams that are cancelled leave nothing behind, and prompts that are cached are guessed behind as before."""
    guessing = small(checkpoint, tmp_path, scheduling={"speculation": drafting(drafts["itself"])})
    try:
        body = {"model": MODEL, "prompt": "one two three", "seed": 8, "ignore_eos": True, "stream": True}
        long = body | {"max_tokens": 700}
        with httpx.stream("POST", guessing.url + "/v1/completions", json=long, timeout=120) as response:
            lines = response.iter_lines()
            for _ in range(12):
                next(lines)
        guessing.wait_idle()
        (rank,) = processes(guessing, "medha_worker.rank")
        assert streamed(guessing, 700, body, kill=rank, after=12) == streamed(served, 700, body)
        for _ in range(2):
            assert_same(answers(guessing), expected)
        assert "".join(guessing.lines).count("loading the draft model") == 2
        guessing.wait_idle()
        assert guessing.interrupt() == 0
    finally:
        stop(guessing)


DEEP_LAYERS = 12
KEPT = 0.02
CUT_AFTER, CUT_TOKENS = 40, 400
CUT_STREAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.3, "seed": 11},
}


@pytest.fixture(scope="module")
def guessed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `model` whose texts depend mostly on the last token, and a `draft` model and a `head` that know most of them.

    The model has many layers, which are equal, and the draft model one of them. So guesses pay.
    """
    folder = tmp_path_factory.mktemp("guessed")
    model, draft = folder / "model", folder / "draft"
    init_checkpoint(model, preset="tiny", seed=3, architecture="qwen3")
    make_target_forget(model, kept=KEPT)
    shutil.copytree(model, draft)
    tensors = load_file(model / "model.safetensors")
    first = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.0.")}
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.")}
    for directory, layers in ((draft, 1), (model, DEEP_LAYERS)):
        copies = {
            name.replace(".0.", f".{layer}.", 1): tensor.clone()
            for layer in range(layers)
            for name, tensor in first.items()
        }
        save_file(others | copies, directory / "model.safetensors")
        config = json.loads((directory / "config.json").read_text()) | {"num_hidden_layers": layers}
        (directory / "config.json").write_text(json.dumps(config))
    init_eagle3(folder / "head", model, seed=3)
    make_always_right(folder / "head", model)
    return folder


def cut_body(fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "one two three " * 9, "ignore_eos": True, "stream": True, **fields}


@pytest.fixture(scope="module")
def undisturbed(guessed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The streams of a replica that does not guess, and that nothing happens to."""
    plain = small(guessed / "model", tmp_path_factory.mktemp("plain"))
    try:
        return {name: streamed(plain, CUT_TOKENS, cut_body(fields)) for name, fields in CUT_STREAMS.items()}
    finally:
        stop(plain)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", ["promptLookup", "draftModel", "predictionHead"])
def test_a_stream_that_guesses_goes_on_with_the_same_text_when_the_rank_dies(
    guessed: Path, undisturbed: dict[str, str], tmp_path: Path, method: str
) -> None:
    """The rank dies once guesses of the stream have been verified, and others are after that."""
    speculation: dict[str, Any] = {
        "promptLookup": {"method": method},
        "draftModel": drafting(guessed / "draft"),
        "predictionHead": {
            "method": method,
            "predictionHead": {"kind": "eagle3", "source": {"path": str(guessed / "head")}},
        },
    }[method]
    guessing = small(guessed / "model", tmp_path, scheduling={"speculation": speculation})
    try:
        for cuts, (name, fields) in enumerate(CUT_STREAMS.items(), start=1):
            at_first = at_death = counted(guessing, "medha_drafted_tokens")
            pieces = list[str]()
            for piece in text_pieces(guessing, CUT_TOKENS, cut_body(fields)):
                pieces.append(piece)
                is_early = len(pieces) < CUT_AFTER or len(pieces) % 10
                if is_early or at_death > at_first or counted(guessing, "medha_drafted_tokens") == at_first:
                    continue
                (rank,) = processes(guessing, "medha_worker.rank")
                rank.kill()
                rank.wait(10)
                at_death = counted(guessing, "medha_drafted_tokens")
            assert "".join(pieces) == undisturbed[name]
            assert at_first < at_death < counted(guessing, "medha_drafted_tokens")
            assert guessing.metric("medha_stream_pause_seconds_count") == cuts
            guessing.wait_idle()
    finally:
        stop(guessing)


@pytest.fixture(scope="module")
def with_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a prediction head."""
    directory = tmp_path_factory.mktemp("head") / "tiny"
    init_checkpoint(directory, preset="tiny", seed=3, architecture="deepseek_v3", mtp_layers=1)
    return directory


@pytest.fixture(scope="module")
def without_its_head(with_head: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], str, str]:
    """The answers of a replica that does not use the head, a streamed chat and a longer stream."""
    plain = small(with_head, tmp_path_factory.mktemp("plain"))
    try:
        return answers(plain), chat(plain), streamed(plain, CUT_TOKENS, cut_body(CUT_STREAMS["sampled"]))
    finally:
        stop(plain)


def chat(served: Served) -> str:
    """Stream a sampled chat through the client."""
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        chunks = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me of the river."}],
            temperature=0.8,
            seed=11,
            max_tokens=120,
            stream=True,
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "shape",
    [{}, {"tensor": 2, "stream": 2}, {"stream": 2, "kv": 2}],
    ids=["one rank", "grid", "lanes"],
)
def test_answers_with_a_head_are_those_of_a_replica_that_does_not_use_it(
    with_head: Path, without_its_head: tuple[list[Any], str, str], tmp_path: Path, shape: dict[str, int]
) -> None:
    """Also while a rank is killed, and behind that, when it has read its head again."""
    expected, expected_chat, expected_stream = without_its_head
    record = tmp_path / "record.jsonl"
    speculation = {"method": "predictionHead", "predictionHead": {"kind": "mtp"}, "maxDraftTokens": 3}
    served = small(
        with_head,
        tmp_path,
        "--record",
        str(record),
        scheduling={"speculation": speculation},
        parallelism=shape,
    )
    try:
        assert_same(answers(served), expected)
        assert chat(served) == expected_chat
        drafted, accepted = (
            counted(served, name) for name in ("medha_drafted_tokens", "medha_accepted_draft_tokens")
        )
        assert drafted >= accepted  # how much is proposed depends on the time that it takes
        log = "".join(served.lines)
        assert "a guess of the prediction head takes" in log
        assert re.search(r"Prediction head\W+mtp", log)
        assert log.count("loading the prediction head") == shape.get("kv", 1), "on the ranks that sample"
        served.wait_idle()
        rank, body = processes(served, "medha_worker.rank")[0], cut_body(CUT_STREAMS["sampled"])
        assert streamed(served, CUT_TOKENS, body, kill=rank, after=CUT_AFTER) == expected_stream
        assert served.metric("medha_stream_pause_seconds_count") == 1
        assert chat(served) == expected_chat
        served.wait_idle()
        assert served.interrupt() == 0
    finally:
        stop(served)
    assert_replays(record)


@pytest.fixture(scope="module")
def with_eagle3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, `tiny`, and an EAGLE-3 head that knows its texts, `head`."""
    folder = tmp_path_factory.mktemp("eagle3")
    init_checkpoint(folder / "tiny", preset="tiny", seed=3, architecture="qwen3")
    init_eagle3(folder / "head", folder / "tiny", seed=3)
    make_target_forget(folder / "tiny")
    make_always_right(folder / "head", folder / "tiny")
    return folder


@pytest.fixture(scope="module")
def without_eagle3(with_eagle3: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], str]:
    """The answers of a replica that does not use the head, and a streamed chat."""
    plain = small(with_eagle3 / "tiny", tmp_path_factory.mktemp("plain"))
    try:
        return answers(plain), chat(plain)
    finally:
        stop(plain)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "shape", [{}, {"tensor": 2, "stream": 2}, {"kv": 2}], ids=["one rank", "grid", "lanes"]
)
def test_answers_with_an_eagle3_head_are_those_of_a_replica_that_does_not_use_it(
    with_eagle3: Path, without_eagle3: tuple[list[Any], str], tmp_path: Path, shape: dict[str, int]
) -> None:
    expected, expected_chat = without_eagle3
    head = {"kind": "eagle3", "source": {"path": str(with_eagle3 / "head")}}
    speculation = {"method": "predictionHead", "predictionHead": head, "maxDraftTokens": 3}
    record = tmp_path / "record.jsonl"
    served = small(
        with_eagle3 / "tiny",
        tmp_path,
        "--record",
        str(record),
        scheduling={"speculation": speculation},
        parallelism=shape,
    )
    try:
        assert_same(answers(served), expected)
        assert chat(served) == expected_chat
        drafted, accepted = (
            counted(served, name) for name in ("medha_drafted_tokens", "medha_accepted_draft_tokens")
        )
        assert accepted >= 0.5 * drafted  # how much is proposed depends on the time that it takes
        log = "".join(served.lines)
        assert "a guess of the prediction head takes" in log
        assert re.search(r"Prediction head\W+eagle3", log)
        assert log.count("loading the prediction head") == shape.get("kv", 1), "on the ranks that sample"
        served.wait_idle()
        assert served.interrupt() == 0
    finally:
        stop(served)
    assert_replays(record)


def assert_replays(record: Path) -> None:
    """Check that a record replays to the same decisions."""
    command = [sys.executable, "-m", "medha_cli.main", "replay", str(record)]
    replayed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


def test_a_checkpoint_without_a_head_ends_the_start_with_the_field(checkpoint: Path, tmp_path: Path) -> None:
    speculation = {"method": "predictionHead", "predictionHead": {"kind": "mtp"}}
    manifest = write_manifest(
        tmp_path / "m.yaml", checkpoint, free_port(), scheduling={"speculation": speculation}
    )
    command = [sys.executable, "-m", "medha_cli.main", "up", str(manifest)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    told = " ".join((done.stdout + done.stderr).split())
    assert "spec.scheduling.speculation.predictionHead.kind is mtp" in told
    assert "choose a checkpoint with them" in told
