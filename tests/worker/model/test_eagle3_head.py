"""An EAGLE-3 head has the logits of its reference, and guesses without changing a text."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from medha.api.replica import MedhaReplicaSpec
from medha.errors import CheckpointInvalid, ConfigInvalid, MedhaError, ModelUnsupported
from medha.kv.blocks import BlockCopy
from medha.kv.host_tier import TierCopy
from medha.topology import Topology
from medha.wire.messages import Extent, Sampling, Step, StepEntry
from medha_worker.checkpoints.eagle3_preset import init_eagle3
from medha_worker.checkpoints.head_checkpoint import FIELD, eagle3_config
from medha_worker.checkpoints.preflight import RANK_BYTES, require_possible
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.model.eagle3_config import Eagle3Config
from medha_worker.model.eagle3_head import Eagle3Head
from medha_worker.model.eagle3_tensors import find_eagle3_tensors
from medha_worker.model.host_blocks import HostBlocks
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import load_embedding

from ..eagle3_reference import (
    ReferenceEagle3,
    Tensors,
    change_head,
    make_always_right,
    make_target_forget,
    target_states,
    whole_vocabulary,
)
from ..models import kernels_of_a_rank, load_eagle3, load_model
from ..rank.test_drafter import SAMPLINGS, Decoding, Failing, assert_same, assert_same_for_any_parameters
from ..rank.test_executor import BLOCK_TOKENS, GREEDY, VOCAB, Engine, admit, entry, random_ids
from ..ranks import Ranks

IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass
class Headed:
    """A checkpoint and that of its head, and both as they are loaded."""

    directory: Path
    head_directory: Path
    model: Transformer
    head: Eagle3Head

    @property
    def config(self) -> ModelConfig:
        return self.model.config


def headed(folder: Path, max_model_len: int = 1024, *, compiled: bool = False) -> Headed:
    """Load the checkpoints `tiny` and `head` in a folder, with plain torch or the kernels that a rank chooses."""
    config = ModelConfig.from_directory(folder / "tiny", max_model_len=max_model_len)
    head = eagle3_config(folder / "head", config)
    kernels = [kernels_of_a_rank(one) if compiled else None for one in (config, head.layer)]
    return Headed(
        folder / "tiny",
        folder / "head",
        load_model(folder / "tiny", config, kernels=kernels[0], collected=head.collected),
        load_eagle3(folder / "head", config, folder / "tiny", kernels[1]),
    )


def make(folder: Path, architecture: str = "llama", seed: int = 2) -> Path:
    """Make the checkpoints `tiny` and `head` in a folder."""
    init_checkpoint(folder / "tiny", preset="tiny", seed=seed, architecture=architecture)
    init_eagle3(folder / "head", folder / "tiny", seed=seed)
    return folder


@pytest.fixture(scope="module")
def random_head(tmp_path_factory: pytest.TempPathFactory) -> Headed:
    return headed(make(tmp_path_factory.mktemp("random")))


@pytest.fixture(scope="module")
def right_head(tmp_path_factory: pytest.TempPathFactory) -> Headed:
    folder = make(tmp_path_factory.mktemp("right"))
    make_target_forget(folder / "tiny")
    make_always_right(folder / "head", folder / "tiny")
    return headed(folder)


def decode(
    one: Headed, samplings: Sequence[Sampling], proposes: int = 3, head: Any = None, **more: Any
) -> Decoding:
    """Decode a sequence of each sampling until it ends, together, and verify the head's guesses; none without `proposes`."""
    decoding = Decoding(Engine(one.model, (head or one.head) if proposes else None, **more), proposes)
    for index, sampling in enumerate(samplings):
        decoding.start(f"s{index}", random_ids(12 + 9 * index, index), sampling, seed=index)
    decoding.run()
    return decoding


# --- the head itself ------------------------------------------------------------------------------------


def to_speculators(directory: Path) -> None:
    """Write a head in the form of speculators."""
    config = json.loads((directory / "config.json").read_text())
    own = ("architectures", "draft_vocab_size", IDS)
    layer = {name: value for name, value in config.items() if name not in own}
    nested = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        **{name: config[name] for name in own[1:]},
    }
    (directory / "config.json").write_text(json.dumps(nested))
    tensors = load_file(directory / "model.safetensors")
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    save_file(named, directory / "model.safetensors")


def add_biases(found: Tensors) -> None:
    for name, rows in (("fc", 128), ("midlayer.self_attn.o_proj", 128)):
        found[f"{name}.bias"] = torch.randn(rows, generator=torch.Generator().manual_seed(1))
    for name in "qkv":
        rows = len(found[f"midlayer.self_attn.{name}_proj.weight"])
        found[f"midlayer.self_attn.{name}_proj.bias"] = torch.linspace(-1, 1, rows)


def embed_itself(found: Tensors) -> None:
    found["embed_tokens.weight"] = torch.randn(VOCAB, 128, generator=torch.Generator().manual_seed(2))


def narrower(found: Tensors) -> None:
    """Have half of the model's width, and an embedding of that."""
    embed_itself(found)
    for name, tensor in found.items():
        part = [slice(size // 2) if size in (128, 256) else slice(None) for size in tensor.shape]
        if name == "lm_head.weight":
            part = [slice(None), slice(64)]
        elif ".k_proj" in name or ".v_proj" in name:
            part = [slice(32), slice(128)]
        if tensor.is_floating_point():
            found[name] = tensor[tuple(part)].contiguous()


def more_heads(found: Tensors) -> None:
    """Have as many heads of K and V as of queries, which the model has not."""
    for name in "kv":
        weight = found[f"midlayer.self_attn.{name}_proj.weight"]
        found[f"midlayer.self_attn.{name}_proj.weight"] = torch.cat([weight, weight.flip(0)])


@pytest.mark.parametrize(
    ("architecture", "fields", "tensors", "compiled"),
    [
        ("llama", {}, lambda _: None, True),
        ("qwen3", {"norm_before_residual": True}, lambda _: None, False),
        ("mixtral", {"draft_vocab_size": None}, whole_vocabulary, False),
        ("gemma3_text", {"attention_bias": True}, add_biases, False),
        ("deepseek_v3", {}, embed_itself, False),
        ("gpt_oss", {"num_key_value_heads": 4}, more_heads, False),
        ("llama", {"target_hidden_size": 128, "hidden_size": 64, "head_dim": 16}, narrower, False),
    ],
)
def test_logits_are_those_of_the_reference(
    tmp_path: Path,
    architecture: str,
    fields: dict[str, Any],
    tensors: Callable[[Tensors], None],
    *,
    compiled: bool,
) -> None:
    """The head computes chunks of a prompt over its KV, and the reference the whole sequence at once."""
    folder = make(tmp_path, architecture)
    change_head(folder / "head", fields, tensors)
    one = headed(folder, compiled=compiled)
    weights = load_file(folder / "head" / "model.safetensors")
    values = json.loads((folder / "head" / "config.json").read_text())
    embedding = load_file(folder / "tiny" / "model.safetensors")["model.embed_tokens.weight"]
    reference = ReferenceEagle3(weights, values, embedding)
    ids = random_ids(30, 5)
    tokens = torch.from_numpy(ids.astype(np.int64))
    collected = eagle3_config(folder / "head", one.config).collected
    states, logits = target_states(folder / "tiny", tokens, collected)
    with torch.inference_mode():
        next_token = logits[-1].argmax()
        before = reference.reduced(states)
        hidden = reference.hidden(before, torch.cat([tokens[1:], next_token[None]]))
        expected = reference.logits(hidden)
        guesses = [expected[-1].argmax()]
        # Behind the last token, the head goes on from its own hidden states.
        for _ in range(2):
            before = torch.cat([before, hidden[-1:]])
            hidden = reference.hidden(before, torch.cat([tokens[1:], next_token[None], torch.stack(guesses)]))
            guesses.append(reference.logits(hidden)[-1].argmax())

    found: list[torch.Tensor] = []

    class Recording:
        def __getattr__(self, name: str) -> Any:
            return getattr(one.head, name)

        def forward(self, *arguments: Any) -> torch.Tensor:
            hidden = one.head.forward(*arguments)
            found.append(one.head.logits(hidden))
            return hidden

    decoding = Decoding(Engine(one.model, Recording()), proposes=3)  # type: ignore[arg-type]
    decoding.start("a", ids, GREEDY)
    torch.testing.assert_close(torch.cat(found[:-2]), expected, atol=5e-4, rtol=1e-3)
    assert decoding.drafts["a"] == tuple(map(int, guesses))
    assert decoding.texts["a"] == [next_token]


def test_the_form_of_speculators_is_the_same_head(random_head: Headed, tmp_path: Path) -> None:
    """There, a norm before the residual is the default."""
    folder = make(tmp_path)
    to_speculators(folder / "head")
    flat = eagle3_config(random_head.head_directory, random_head.config)
    assert eagle3_config(folder / "head", random_head.config) == replace(flat, norms_before_residual=True)
    tokens, cache = torch.arange(20), random_head.model.new_kv_cache(2, BLOCK_TOKENS, head=random_head.head)
    change_head(folder / "head", {"norm_before_residual": False})
    found = [
        one.forward(tokens, one.prepare(tokens, [SequenceSpan(0, 20, 0, [0, 1])], cache.last_layer()))
        for one in (random_head.head, headed(folder).head)
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("fields", "collected"),
    [
        ({IDS: None}, (2, 16, 29)),
        ({IDS: [1, 9, 32]}, (1, 9, 32)),
        ({IDS: None, "eagle_config": {IDS: [1, 15, 28]}}, (2, 16, 29)),
        ({IDS: None, "eagle_config": {IDS: []}}, (2, 16, 29)),
        ({IDS: []}, (2, 16, 29)),
    ],
    ids=["the default", "inputs of layers", "results of layers", "no results named", "none named"],
)
def test_the_layers_are_those_that_published_configurations_mean(
    random_head: Headed, tmp_path: Path, fields: dict[str, Any], collected: tuple[int, ...]
) -> None:
    folder = make(tmp_path)
    change_head(folder / "head", fields)
    deep = replace(random_head.config, num_layers=32, windows=(None,) * 32)
    assert Eagle3Config.from_directory(folder / "head", deep).collected == collected


# --- guesses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["all tokens", "half of the tokens"])
def test_texts_are_those_without_a_head_and_a_right_head_is_right(
    random_head: Headed, tmp_path: Path, part: str
) -> None:
    """Greedy and sampled, with log-probabilities, behind prompts that are computed in chunks."""
    folder = make(tmp_path)
    make_target_forget(folder / "tiny")
    guessable = None if part == "all tokens" else torch.arange(0, VOCAB, 2)
    make_always_right(folder / "head", folder / "tiny", guessable)
    for norms_before in (False, True):
        change_head(folder / "head", {"norm_before_residual": norms_before})
        one = headed(folder)
        plain, found = decode(one, SAMPLINGS, 0), decode(one, SAMPLINGS)
        assert_same(found, plain)
        if guessable is None:
            assert found.verified > 50
            assert found.accepted >= 0.95 * found.verified
        else:
            assert 0 < found.accepted < found.verified
            assert all(token % 2 == 0 for drafts in found.drafts.values() for token in drafts)
    plain, found = decode(random_head, SAMPLINGS, 0), decode(random_head, SAMPLINGS)
    assert_same(found, plain)
    assert found.verified > 50


@pytest.mark.parametrize("seed", range(4))
def test_texts_are_those_without_a_head_for_all_parameters(
    random_head: Headed, right_head: Headed, seed: int
) -> None:
    for one in (random_head, right_head):
        assert_same_for_any_parameters(partial(decode, one), VOCAB, seed)


def test_forks_share_the_kv_of_the_head(random_head: Headed, right_head: Headed) -> None:
    sampling, ids = Sampling(temperature=0.9, ignore_eos=True), random_ids(39, 3)
    for one in (random_head, right_head):
        decodings = []
        for head in (None, one.head):
            engine = Engine(one.model, head)
            decoding = Decoding(engine, 0 if head is None else 3)
            decoding.start("s0", ids, sampling)
            fork = admit(
                "s1", ids, sampling, prompt="prompt of s0", sample_index=1, fork_of="s0", shared_tokens=38
            )
            decoding.prompts["s1"] = ids
            drafts = decoding.drafts
            decoding.take(engine.step(entry("s1", 38, 1), admits=(fork,)))
            decoding.drafts |= drafts
            decoding.run()
            decodings.append(decoding)
        assert_same(decodings[1], decodings[0])
        if one is right_head:
            assert decodings[1].accepted >= 0.95 * decodings[1].verified > 20


@pytest.mark.parametrize("calls", [0, 5, 14])
def test_a_head_that_fails_costs_no_token(right_head: Headed, calls: int) -> None:
    failing: Any = Failing(right_head.head, calls)
    plain, found = decode(right_head, SAMPLINGS, 0), decode(right_head, SAMPLINGS, head=failing)
    assert_same(found, plain)
    assert found.drafts == {}


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3"])
def test_the_pools_copies_and_its_tiers_have_the_kv_of_the_head(tmp_path: Path, architecture: str) -> None:
    """Its K and V have a shape of their own, also beside latents."""
    folder = make(tmp_path, architecture)
    change_head(
        folder / "head", {"num_key_value_heads": 4}, more_heads if architecture == "llama" else lambda _: None
    )
    one = headed(folder)
    pool = one.model.new_kv_cache(8, BLOCK_TOKENS, head=one.head)
    assert pool.bytes == 8 * BLOCK_TOKENS * 4 * (
        2 * one.config.kv_tensors * one.config.num_kv_heads * one.config.head_dim + 2 * 128
    )
    last = pool.last_layer()
    expected = []
    for part in (*last.keys, *last.values):
        assert part.shape == (4, 9 * BLOCK_TOKENS, 32)
        part[:, :BLOCK_TOKENS] = torch.randn(4, BLOCK_TOKENS, 32)
        expected.append(part[:, :BLOCK_TOKENS].clone())
    pool.copy_blocks([BlockCopy(0, 1)])
    host = HostBlocks(pool, 2)
    assert host.block_bytes * 8 == pool.bytes
    host.copy([TierCopy(False, 1, 0, 1), TierCopy(True, 3, 0, 1)])
    for part, wanted in zip((*last.keys, *last.values), expected, strict=True):
        assert torch.equal(part[:, 3 * BLOCK_TOKENS : 4 * BLOCK_TOKENS], wanted)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("shape", [(2, 2, 1), (1, 2, 1), (2, 1, 1)])
def test_the_last_stage_of_a_grid_guesses_from_the_hidden_states_of_all_stages(
    random_head: Headed, shape: tuple[int, int, int]
) -> None:
    """A random head guesses as it does on one rank only if all three hidden states are the same there."""
    ids = {name: random_ids(count, seed) for name, count, seed in (("a", 21, 1), ("b", 9, 2))}
    prompts = {f"prompt of {name}": one for name, one in ids.items()}
    plain = Decoding(Engine(random_head.model))
    for name, one in ids.items():
        plain.start(name, one, GREEDY)
    plain.run()
    a, wrong = plain.texts["a"], (plain.texts["a"][3] + 1) % VOCAB
    steps = [
        Step(0, 0, (entry("a", 0, 13, samples=False),), admits=(admit("a", ids["a"]),)),
        Step(
            1, 0, (replace(entry("a", 13, 8), proposes=3), entry("b", 0, 9)), admits=(admit("b", ids["b"]),)
        ),
        Step(
            2,
            0,
            (
                StepEntry("a", 0, (Extent(21, 4),), True, drafts=(a[1], a[2], wrong), proposes=3),
                replace(entry("b", 9, 1), proposes=2),
            ),
        ),
    ]
    runs = []
    for topology in (Topology(*shape), Topology()):
        ranks = Ranks(topology, random_head.directory, eagle3=random_head.head_directory)
        try:
            samples, _ = ranks.run(steps, prompts, kv_blocks=64, block_tokens=BLOCK_TOKENS, steps_ahead=0)
        finally:
            ranks.close()
        runs.append((ranks.drafts, [(one.id, one.token) for one in samples]))
    assert runs[0] == runs[1]
    assert [(name, len(guesses)) for name, guesses in runs[0][0]] == [("a", 3), ("a", 3), ("b", 2)]
    assert [token for name, token in runs[0][1] if name == "a"] == a[:4]


# --- what is refused ------------------------------------------------------------------------------------


def without(*names: str) -> Callable[[Tensors], None]:
    def remove(found: Tensors) -> None:
        for name in names:
            del found[name]

    return remove


def twice(found: Tensors) -> None:
    found["d2t"][1] = found["d2t"][0] - 1


def outside(found: Tensors) -> None:
    found["d2t"][-1] = VOCAB


def others(found: Tensors) -> None:
    found["t2d"] = found["t2d"].roll(1)


def narrow(found: Tensors) -> None:
    found["fc.weight"] = found["fc.weight"][:, :256].contiguous()


def added(found: Tensors) -> None:
    found["mask_hidden"] = torch.zeros(1, 128)


@pytest.mark.parametrize(
    ("fields", "tensors", "kind", "said"),
    [
        (
            {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None},
            None,
            ModelUnsupported,
            "architectures is ['LlamaForCausalLM']",
        ),
        ({"architectures": ["Qwen2ForCausalLM"]}, None, ModelUnsupported, "architectures is ['Qwen2ForCausalLM']"),
        ({"num_hidden_layers": 2}, None, ConfigInvalid, "num_hidden_layers is 2, not 1"),
        ({"model_type": "qwen3"}, None, ModelUnsupported, "model_type is 'qwen3'"),
        ({"norm_output": True}, None, ModelUnsupported, "norm_output is True, which is not supported"),
        ({"fc_norm": True}, None, ModelUnsupported, "fc_norm is True"),
        ({"norm_before_fc": True}, None, ModelUnsupported, "norm_before_fc is True"),
        ({"parallel_drafting": True}, None, ModelUnsupported, "parallel_drafting is True"),
        ({"quantization_config": {}}, None, ModelUnsupported, "quantization_config is {}"),
        ({"norm_before_residual": 1}, None, CheckpointInvalid, "norm_before_residual is 1, but must be true or false"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, None, ModelUnsupported, "use_aux_hidden_state is False"),
        ({"eagle_config": 3}, None, CheckpointInvalid, "eagle_config is 3, but must be an object"),
        ({"target_hidden_size": 256}, None, ConfigInvalid, "target_hidden_size is 256, not 128: it must be the served"),
        ({"hidden_size": 256}, None, ConfigInvalid, "hidden_size is 256, not 128"),
        ({"vocab_size": 1000}, None, ConfigInvalid, "vocab_size is 1000, not 512"),
        ({"draft_vocab_size": 513}, None, CheckpointInvalid, "draft_vocab_size is 513, but must be a whole number"),
        ({IDS: [0, 1, 3]}, None, ConfigInvalid, "[0, 1, 3], but must be 3 ascending layers from 0 to 2"),
        ({IDS: [0, 2]}, None, ConfigInvalid, "[0, 2], but must be 3 ascending layers"),
        ({IDS: [2, 1, 0]}, None, ConfigInvalid, "[2, 1, 0], but must be 3 ascending layers"),
        ({IDS: None}, None, ConfigInvalid, "the default of [2, 1, -1] does not fit the 2 layers"),
        ({}, without("d2t"), CheckpointInvalid, "tensor d2t of shape [256] is missing: it says which tokens"),
        ({}, without("fc.weight"), CheckpointInvalid, "tensor fc.weight of shape [128, 384] is missing"),
        ({}, narrow, CheckpointInvalid, "fc.weight has shape [128, 256], but config.json and the served model make it"),
        ({}, twice, CheckpointInvalid, "d2t maps several ids to token"),
        ({}, outside, CheckpointInvalid, "which is outside the vocabulary of 512"),
        ({}, others, CheckpointInvalid, "t2d names 256 tokens, and d2t maps to 256, which are others"),
        ({}, added, CheckpointInvalid, "tensor mask_hidden is unexpected"),
        (
            {"target_hidden_size": 128, "hidden_size": 64, "head_dim": 16},
            None,
            CheckpointInvalid,
            "tensor embed_tokens.weight of shape [512, 64] is missing: the served model's has 128 values for a token",
        ),
    ],
)  # fmt: skip
def test_a_head_that_does_not_fit_is_refused_with_the_field_and_the_fix(
    random_head: Headed,
    tmp_path: Path,
    fields: dict[str, Any],
    tensors: Callable[[Tensors], None] | None,
    kind: type[MedhaError],
    said: str,
) -> None:
    head = copytree(random_head.head_directory, tmp_path / "head")
    change_head(head, fields, tensors or (lambda _: None))
    with pytest.raises(kind) as raised:
        eagle3_config(head, random_head.config)
    assert f"{FIELD}.source ({head}): " in str(raised.value)
    assert said in str(raised.value)


def saved_by_torch(head: Path, content: object, **options: Any) -> Path:
    """Replace a head's safetensors by what torch saves of `content`."""
    (head / "model.safetensors").unlink(missing_ok=True)
    torch.save(content, head / "pytorch_model.bin", **options)
    return head / "pytorch_model.bin"


def test_a_file_of_torch_is_the_same_head(random_head: Headed, tmp_path: Path) -> None:
    folder = make(tmp_path)
    authors = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64}
    change_head(folder / "head", authors, lambda found: found.update(random_embedding()))
    wanted = headed(folder)
    saved_by_torch(
        folder / "head",
        OrderedDict(
            (name, torch.nn.Parameter(one) if one.is_floating_point() else one)
            for name, one in load_file(folder / "head" / "model.safetensors").items()
        ),
    )
    found = headed(folder)
    assert found.head.weights_bytes == wanted.head.weights_bytes
    ids, hidden = torch.from_numpy(random_ids(20, 1).astype(np.int64)), torch.randn(20, 4 * 128)
    logits = []
    for one in (wanted, found):
        cache = one.model.new_kv_cache(5, BLOCK_TOKENS, head=one.head).last_layer()
        step = one.head.prepare(torch.arange(20), [SequenceSpan(0, 20, 0, range(5))], cache)
        logits.append(one.head.logits(one.head.forward(ids, step, one.head.taken(one.model, hidden))))
    assert logits[0] is not None
    assert logits[1] is not None
    assert torch.equal(logits[0], logits[1])
    assert torch.isfinite(logits[0]).any()


def random_embedding() -> Tensors:
    return {"embed_tokens.weight": torch.randn(VOCAB, 128, generator=torch.Generator().manual_seed(1))}


class Trap:
    """An object whose pickle would make a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_nothing_in_a_file_of_torch_is_run_and_a_damaged_one_is_named(
    random_head: Headed, tmp_path: Path
) -> None:
    head = make(tmp_path) / "head"
    good = load_file(head / "model.safetensors")

    def refused(said: str, kind: type[MedhaError] = CheckpointInvalid) -> None:
        with pytest.raises(kind) as raised:
            eagle3_config(head, random_head.config)
        assert f"{FIELD}.source ({head}): " in str(raised.value)
        assert said in str(raised.value)

    saved_by_torch(head, {**good, "trap": Trap(tmp_path / "run")})
    refused("holds something other than tensors, which is not read")
    assert not (tmp_path / "run").exists()
    saved_by_torch(head, {**good, "epoch": 3})
    refused("holds something other than tensors by name; save its tensors as model.safetensors")
    saved_by_torch(head, {**good, "fc.weight": torch.empty(128, 384, device="meta")})
    refused("holds something other than tensors")
    saved_by_torch(head, [good])
    refused("holds something other than tensors by name")
    saved_by_torch(head, {**good, "fc.weight": good["fc.weight"].double()})
    refused("tensor fc.weight is stored as torch.float64, which is not supported", ModelUnsupported)
    saved_by_torch(head, good, _use_new_zipfile_serialization=False)
    refused("is no complete file of torch.save")
    path = saved_by_torch(head, good)
    eagle3_config(head, random_head.config)
    path.write_bytes(path.read_bytes()[:-5000])
    refused("is no complete file of torch.save")
    path.write_bytes(b"")
    refused("is no complete file of torch.save")
    path.unlink()
    refused("model.safetensors is missing")
    (head / "model.safetensors").write_bytes(b"nothing")
    refused("no complete safetensors file")


def test_the_map_of_a_head_for_all_tokens_may_be_empty(random_head: Headed, tmp_path: Path) -> None:
    """The authors' code removes it where it is loaded."""

    def empty(found: Tensors) -> None:
        whole_vocabulary(found)
        found["d2t"] = torch.zeros(VOCAB, dtype=torch.int64)
        found["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)

    head = make(tmp_path) / "head"
    change_head(head, {"draft_vocab_size": VOCAB}, empty)
    targets = find_eagle3_tensors(head, eagle3_config(head, random_head.config)).targets
    assert targets is not None
    assert targets.tolist() == list(range(VOCAB))


def spec_of(one: Headed, **more: Any) -> MedhaReplicaSpec:
    head = {"kind": "eagle3", "source": {"path": str(one.head_directory)}}
    return MedhaReplicaSpec.model_validate(
        {
            "model": {"name": "m", "source": {"path": str(one.directory)}},
            "scheduling": {"speculation": {"method": "predictionHead", "predictionHead": head}},
            **more,
        }
    )


def test_it_needs_memory_for_its_weights(random_head: Headed) -> None:
    needed = RANK_BYTES + random_head.model.weights_bytes + random_head.head.weights_bytes
    require_possible(
        spec_of(random_head), random_head.directory, int(needed * 1.01), random_head.head_directory
    )
    with pytest.raises(ConfigInvalid, match="need at least"):
        require_possible(
            spec_of(random_head), random_head.directory, needed - 2**20, random_head.head_directory
        )


def test_an_embedding_that_is_read_for_the_head_alone_counts(random_head: Headed) -> None:
    """On a grid, the rank that samples holds no whole embedding of the model."""
    embedding = load_embedding(random_head.directory, random_head.config, device=random_head.model.device)
    alone = Eagle3Head.read(
        random_head.head_directory,
        eagle3_config(random_head.head_directory, random_head.config),
        device=random_head.model.device,
        kernels=random_head.head.kernels,
        embedding=lambda: embedding,
    )
    assert alone.weights_bytes == random_head.head.weights_bytes + embedding.nbytes


@pytest.mark.parametrize("head", [{"kind": "eagle3"}, {"kind": "mtp", "source": {"path": "h"}}])
def test_the_kind_and_the_source_belong_together(random_head: Headed, head: dict[str, Any]) -> None:
    speculation = {"method": "predictionHead", "predictionHead": head}
    with pytest.raises(ValueError, match="source is given if, and only if, kind is eagle3"):
        spec_of(random_head, scheduling={"speculation": speculation})


def test_a_head_is_made_for_its_target_alone(tmp_path: Path) -> None:
    folder = make(tmp_path)
    made = [(folder / "head" / name).read_bytes() for name in ("config.json", "model.safetensors")]
    init_eagle3(folder / "again", folder / "tiny", seed=2)
    assert made == [(folder / "again" / name).read_bytes() for name in ("config.json", "model.safetensors")]
    with pytest.raises(ConfigInvalid, match="is not empty"):
        init_eagle3(folder / "head", folder / "tiny", seed=3)
    with pytest.raises(ConfigInvalid, match="seed is -1"):
        init_eagle3(folder / "other", folder / "tiny", seed=-1)
    config = json.loads((folder / "tiny" / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "tiny" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigInvalid, match="has one layer"):
        init_eagle3(folder / "other", folder / "tiny", seed=0)
