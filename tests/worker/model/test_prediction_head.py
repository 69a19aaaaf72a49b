"""A prediction head has the logits of the published architecture, and guesses without changing a text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from medha.api.replica import MedhaReplicaSpec
from medha.cost.predictor import Predictor, Work
from medha.errors import CheckpointInvalid, ConfigInvalid
from medha.kv.blocks import BlockCopy
from medha.kv.host_tier import TierCopy
from medha.topology import Topology
from medha.wire.messages import Extent, Sampling, Step, StepEntry
from medha_worker.checkpoints.head_checkpoint import FIELD, head_config
from medha_worker.checkpoints.preflight import RANK_BYTES, require_possible
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.device import Runtime
from medha_worker.model.host_blocks import HostBlocks
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.prediction_head import PredictionHead
from medha_worker.model.transformer import Transformer
from medha_worker.profiling.profile_fit import MeasuredStep
from medha_worker.rank.draft_warmup import warm_up_draft, with_head
from medha_worker.rank.warmup import WarmUp, step_profile

from ..models import load_head, load_model
from ..rank.test_drafter import SAMPLINGS, Decoding, Failing, assert_same, assert_same_for_any_parameters
from ..rank.test_executor import BLOCK_TOKENS, GREEDY, VOCAB, Engine, admit, entry, random_ids
from ..ranks import Ranks
from .head_reference import ReferenceHead

LAYER = "model.layers.2."


@dataclass
class Headed:
    """A checkpoint with a head, and both as they are loaded."""

    directory: Path
    model: Transformer
    head: PredictionHead


def headed(directory: Path) -> Headed:
    config = ModelConfig.from_directory(directory, max_model_len=1024)
    return Headed(directory, load_model(directory, config), load_head(directory, config))


def change(directory: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Replace tensors of a checkpoint, or remove those that are None."""
    (file,) = directory.glob("*.safetensors")
    tensors: dict[str, Any] = load_file(file) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


def make_right(directory: Path) -> None:
    """Let each next token depend on the last one alone, and let the head embed it as the model does."""
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    changes: dict[str, torch.Tensor | None] = {
        name: torch.zeros_like(tensor)
        for name, tensor in tensors.items()
        if name.endswith(("o_proj.weight", "down_proj.weight"))
    }
    hidden = len(tensors["model.norm.weight"])
    changes[f"{LAYER}eh_proj.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    changes[f"{LAYER}enorm.weight"] = torch.ones(hidden)
    changes[f"{LAYER}shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    change(directory, changes)


@pytest.fixture(scope="module")
def random_head(tmp_path_factory: pytest.TempPathFactory) -> Headed:
    directory = tmp_path_factory.mktemp("random") / "tiny"
    init_checkpoint(directory, preset="tiny", seed=2, architecture="deepseek_v3", mtp_layers=1)
    return headed(directory)


@pytest.fixture(scope="module")
def right_head(tmp_path_factory: pytest.TempPathFactory) -> Headed:
    directory = tmp_path_factory.mktemp("right") / "tiny"
    init_checkpoint(directory, preset="tiny", seed=2, architecture="deepseek_v3", mtp_layers=2)
    make_right(directory)
    return headed(directory)


def decode(
    one: Headed,
    samplings: Sequence[Sampling],
    proposes: int = 3,
    head: PredictionHead | None = None,
    **more: Any,
) -> Decoding:
    """Decode a sequence of each sampling until it ends, together, and verify the head's guesses; none without `proposes`."""
    decoding = Decoding(Engine(one.model, (head or one.head) if proposes else None, **more), proposes)
    for index, sampling in enumerate(samplings):
        decoding.start(f"s{index}", random_ids(12 + 9 * index, index), sampling, seed=index)
    decoding.run()
    return decoding


# --- the head itself ------------------------------------------------------------------------------------


def test_logits_are_those_of_the_published_architecture(random_head: Headed) -> None:
    """The head computes chunks of a prompt over its KV, and the reference the whole sequence at once."""
    directory, model = random_head.directory, random_head.model
    config = json.loads((directory / "config.json").read_text())
    reference = ReferenceHead(load_file(directory / "model.safetensors"), config, 2)
    served = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = random_ids(30, 5)
    tokens = torch.from_numpy(ids.astype(np.int64))
    with torch.inference_mode():
        normed = served.model(tokens[None]).last_hidden_state[0]
        next_token = served.lm_head(normed[-1]).argmax()
        hidden = reference.hidden(normed, torch.cat([tokens[1:], next_token[None]]))
        expected = reference.logits(hidden)
        first = expected[-1].argmax()
        # Behind the last token, the head goes on from its own hidden state.
        known = torch.cat([tokens[1:], next_token[None], first[None]])
        second = reference.logits(reference.hidden(torch.cat([normed, hidden[-1:]]), known))[-1].argmax()

    found: list[torch.Tensor] = []

    class Recording:
        def __getattr__(self, name: str) -> Any:
            return getattr(random_head.head, name)

        def forward(self, *arguments: Any) -> torch.Tensor:
            hidden = random_head.head.forward(*arguments)
            found.append(random_head.head.logits(hidden))  # type: ignore[arg-type]
            return hidden

    decoding = Decoding(Engine(model, Recording()), proposes=2)  # type: ignore[arg-type]
    decoding.start("a", ids, GREEDY)
    torch.testing.assert_close(torch.cat(found[:-1]), expected, atol=2e-4, rtol=1e-3)
    assert decoding.drafts["a"] == (first, second)
    assert decoding.texts["a"] == [next_token]


def test_a_checkpoint_of_the_preset_differs_in_the_mtp_layers_alone(
    random_head: Headed, tmp_path: Path
) -> None:
    init_checkpoint(tmp_path / "plain", preset="tiny", seed=2, architecture="deepseek_v3")
    plain, found = (
        load_file(one / "model.safetensors") for one in (tmp_path / "plain", random_head.directory)
    )
    assert all(torch.equal(tensor, found[name]) for name, tensor in plain.items())
    further = found.keys() - plain.keys()
    assert all(name.startswith(LAYER) for name in further)
    assert f"{LAYER}eh_proj.weight" in further
    with pytest.raises(ConfigInvalid, match="MTP layers are 1 for architecture llama; give 0, or"):
        init_checkpoint(tmp_path / "llama", preset="tiny", seed=2, mtp_layers=1)


@pytest.mark.parametrize("quantisation", [pytest.param("fp8-block", marks=pytest.mark.long), "w4a16"])
def test_the_layer_of_a_head_may_be_quantised(tmp_path: Path, quantisation: str) -> None:
    init_checkpoint(
        tmp_path / "q", preset="small", seed=1, architecture="deepseek_v3", mtp_layers=1, quantisation=quantisation
    )  # fmt: skip
    one = headed(tmp_path / "q")
    config = ModelConfig.from_directory(tmp_path / "q")
    assert one.head.weights_bytes == pytest.approx(config.head_weights_bytes(4), rel=0.05)


# --- guesses --------------------------------------------------------------------------------------------


def test_texts_are_those_without_a_head_and_a_right_head_is_always_right(
    random_head: Headed, right_head: Headed
) -> None:
    """Greedy and sampled, with log-probabilities, behind prompts that are computed in chunks."""
    for one in (random_head, right_head):
        plain, found = decode(one, SAMPLINGS, 0), decode(one, SAMPLINGS)
        assert_same(found, plain)
        assert found.verified > 50
        if one is right_head:
            assert found.accepted >= 0.95 * found.verified


@pytest.mark.parametrize("seed", range(4))
def test_texts_are_those_without_a_head_for_all_parameters(
    random_head: Headed, right_head: Headed, seed: int
) -> None:
    for one in (random_head, right_head):
        assert_same_for_any_parameters(partial(decode, one), VOCAB, seed)


@pytest.mark.parametrize("proposes", [{"b": 1, "c": 3}, {"b": 3, "c": 1, "d": 1}, {"a": 2, "d": 4}])
def test_guesses_of_a_sequence_are_the_same_beside_others(
    random_head: Headed, proposes: dict[str, int]
) -> None:
    """Some are asked for fewer guesses, and some for none."""

    def guesses(asked: dict[str, int]) -> dict[str, tuple[int, ...]]:
        decoding = Decoding(Engine(random_head.model, random_head.head))
        for index, name in enumerate("abcd"):
            decoding.start(name, random_ids(12 + 5 * index, index), GREEDY)
        entries = [
            replace(entry(name, len(ids), 1), proposes=asked.get(name, 0))
            for name, ids in decoding.prompts.items()
        ]
        return dict(decoding.engine.step(*entries).drafts)

    alone = {name: guesses({name: count})[name] for name, count in proposes.items()}
    assert {name: len(found) for name, found in alone.items()} == proposes
    assert guesses(proposes) == alone


def test_guesses_end_where_the_kv_of_a_sequence_ends(right_head: Headed) -> None:
    decoding = Decoding(Engine(right_head.model, right_head.head), proposes=4)
    decoding.start("a", random_ids(BLOCK_TOKENS - 2, 0), GREEDY, reserved_tokens=BLOCK_TOKENS)
    assert len(decoding.drafts["a"]) == 3, "the positions of the prompt's end and of two guesses hold KV"


def test_forks_and_cached_prompts_share_the_kv_of_the_head(random_head: Headed, right_head: Headed) -> None:
    """The head's KV at a shared position is what it would compute itself."""
    sampling, ids = Sampling(temperature=0.9, ignore_eos=True), random_ids(39, 3)
    for one in (random_head, right_head):
        engines = []
        for head in (None, one.head):
            engine = Engine(one.model, head)
            decoding = Decoding(engine, 0 if head is None else 3)
            decoding.start("s0", ids, sampling)
            forks = tuple(
                admit(f"s{index}", ids, sampling, prompt="prompt of s0", sample_index=index, fork_of="s0", shared_tokens=38)
                for index in (1, 2)
            )  # fmt: skip
            for fork in forks:
                decoding.prompts[fork.id] = ids
            drafts = decoding.drafts
            decoding.take(engine.step(*(entry(fork.id, 38, 1) for fork in forks), admits=forks))
            decoding.drafts |= drafts
            decoding.run()
            engines.append(decoding)
        assert_same(engines[1], engines[0])
        assert len({tuple(text) for text in engines[0].texts.values()}) == 3
        if one is right_head:
            assert engines[1].accepted >= 0.95 * engines[1].verified > 20


def test_the_pools_copies_and_its_tiers_have_the_kv_of_the_head(random_head: Headed) -> None:
    pool = random_head.model.new_kv_cache(8, BLOCK_TOKENS, head=random_head.head)
    (keys,) = pool.last_layer().keys
    assert len(pool.keys) == 3
    assert keys.data_ptr() == pool.keys[2].data_ptr()
    keys[:, :BLOCK_TOKENS] = torch.randn(keys[:, :BLOCK_TOKENS].shape)
    expected = keys[:, :BLOCK_TOKENS].clone()
    pool.copy_blocks([BlockCopy(0, 1)])
    host = HostBlocks(pool, 2)
    assert host.block_bytes * 8 == pool.bytes
    host.copy([TierCopy(False, 1, 0, 1), TierCopy(True, 3, 0, 1)])
    assert torch.equal(keys[:, 3 * BLOCK_TOKENS : 4 * BLOCK_TOKENS], expected)


@pytest.mark.parametrize("calls", [0, 5, 14])
def test_a_head_that_fails_costs_no_token(right_head: Headed, calls: int) -> None:
    failing: Any = Failing(right_head.head, calls)
    plain, found = decode(right_head, SAMPLINGS, 0), decode(right_head, SAMPLINGS, head=failing)
    assert_same(found, plain)
    assert found.drafts == {}


class Launching:
    """A device that does what it was given only when it is waited for."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.seconds = self.given_seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def synchronise(self) -> None:
        self.seconds, self.given_seconds = self.seconds + self.given_seconds, 0.0


class Launched:
    """A head whose forward passes take such a device a second each."""

    def __init__(self, head: PredictionHead, device: Launching) -> None:
        self._head, self._launching = head, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def forward(self, *arguments: Any) -> torch.Tensor:
        self._launching.given_seconds += 1.0
        return self._head.forward(*arguments)


def test_what_it_computes_along_with_a_step_is_no_time_of_its_guesses(
    random_head: Headed, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = random_head.model.device
    launching: Any = Launching(device.runtime)
    launched: Any = Launched(random_head.head, launching)
    monkeypatch.setattr(random_head.model, "device", replace(device, runtime=launching))
    decoding = Decoding(Engine(random_head.model, launched))
    monkeypatch.setattr(decoding.engine.executor, "_clock", lambda: launching.seconds)
    ids = random_ids(12, 0)
    decoding.start("a", ids, GREEDY)
    done = decoding.engine.step(replace(entry("a", len(ids), 1), proposes=3))
    assert len(dict(done.drafts)["a"]) == 3
    assert (done.compute_seconds, done.draft_seconds) == (3.0, 2.0), "its guesses but for the last one"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("shape", [(2, 2, 1), (1, 2, 1)])
def test_the_last_stage_of_a_grid_guesses_from_its_hidden_states(
    right_head: Headed, shape: tuple[int, int, int]
) -> None:
    sampling = Sampling(temperature=0.8, ignore_eos=True)
    ids = {name: random_ids(count, seed) for name, count, seed in (("a", 21, 1), ("b", 9, 2))}
    prompts = {f"prompt of {name}": one for name, one in ids.items()}
    plain = Decoding(Engine(right_head.model))
    for name, one in ids.items():
        plain.start(name, one, sampling)
    plain.run()
    a, b = plain.texts["a"], plain.texts["b"]
    wrong = (a[4] + 1) % VOCAB
    steps = [
        Step(0, 0, (entry("a", 0, 13, samples=False),), admits=(admit("a", ids["a"], sampling),)),
        Step(
            1,
            0,
            (replace(entry("a", 13, 8), proposes=2), entry("b", 0, 9)),
            admits=(admit("b", ids["b"], sampling),),
        ),
        Step(
            2,
            0,
            (
                StepEntry("a", 0, (Extent(21, 5),), True, drafts=(a[1], a[2], a[3], wrong), proposes=3),
                replace(entry("b", 9, 1), proposes=1),
            ),
        ),
        Step(3, 0, (StepEntry("b", 0, (Extent(10, 2),), True, drafts=(b[2],), proposes=2), replace(entry("a", 25, 1), proposes=4))),
    ]  # fmt: skip
    ranks = Ranks(Topology(*shape), right_head.directory, has_head=True)
    found = ranks.run_once(steps, prompts, kv_blocks=64, block_tokens=BLOCK_TOKENS, steps_ahead=0)
    assert found == {"a": a[:6], "b": b[:4]}
    assert ranks.drafts == [
        ("a", tuple(a[1:3])),
        ("a", tuple(a[5:8])),
        ("b", tuple(b[2:3])),
        ("b", tuple(b[4:6])),
        ("a", tuple(a[6:10])),
    ]


def test_its_time_is_part_of_every_step_and_its_guesses_have_a_price(random_head: Headed) -> None:
    """Steps of decodes, of chunks that were timed and of larger ones count it, behind any context."""
    ticks = iter(range(10_000))
    shapes = [(Work(0, count),) for count in (1, 16, 64)] + [(Work(128, count),) for count in (1, 16, 64)]
    shapes += [(Work(0, 1),) * 4, (Work(64, 1),) * 4]
    warm = warm_up_draft(
        random_head.head,
        max_chunk_tokens=64,
        max_running=4,
        max_model_len=256,
        clock=lambda: float(next(ticks)),
        followed_steps=shapes,
    )
    assert warm.costs.round_seconds > 0
    assert [one.works for one in warm.steps] == shapes

    def timed(step: float, token: float, pair: float) -> tuple[MeasuredStep, ...]:
        return tuple(
            MeasuredStep(works, step + sum([token * one.count + pair * one.pairs for one in works]), 1e-3)
            for works in shapes
        )

    served, head = (8e-3, 4e-4, 3e-6), (2e-3, 2e-4, 1e-6)
    plain = replace(step_profile(timed(*served)), head_seconds_per_row=1e-4, mask_seconds_per_row=2e-4)
    found = with_head(WarmUp(plain, 0, timed(*served)), replace(warm, steps=timed(*head)))
    before, behind = Predictor(plain), Predictor(found)
    for works in ((Work(0, 1),), (Work(50, 40),), (Work(0, 200),), (Work(9000, 64),), (Work(200, 1),) * 3):
        tokens, pairs = sum([one.count for one in works]), sum([one.pairs for one in works])
        more = head[0] + head[1] * tokens + head[2] * pairs
        assert behind.stage_seconds(works) - before.stage_seconds(works) == pytest.approx(more, rel=0.05)
    assert (found.head_seconds_per_row, found.mask_seconds_per_row) == (1e-4, 2e-4)


# --- what is refused ------------------------------------------------------------------------------------


def spec_of(directory: Path, **parallelism: int) -> MedhaReplicaSpec:
    speculation = {"method": "predictionHead", "predictionHead": {"kind": "mtp"}}
    return MedhaReplicaSpec.model_validate(
        {
            "model": {"name": "m", "source": {"path": str(directory)}},
            "scheduling": {"speculation": speculation},
            "parallelism": parallelism,
        }
    )


@pytest.mark.parametrize("architecture", ["deepseek_v3", "llama"])
def test_a_checkpoint_without_a_head_is_refused_with_the_field_and_the_fix(
    tmp_path: Path, architecture: str
) -> None:
    directory = tmp_path / "plain"
    init_checkpoint(directory, preset="tiny", seed=2, architecture=architecture)
    config = ModelConfig.from_directory(directory)
    with pytest.raises(ConfigInvalid) as raised:
        head_config(directory, config)
    for part in (f"{FIELD}.kind is mtp", str(directory), "num_nextn_predict_layers", "draftModel"):
        assert part in str(raised.value)
    with pytest.raises(ConfigInvalid, match=FIELD):
        require_possible(spec_of(directory), directory, 2**40)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({f"{LAYER}enorm.weight": None}, f"tensor {LAYER}enorm.weight of shape [128] is missing"),
        ({f"{LAYER}mlp.experts.3.up_proj.weight": None}, f"{LAYER}mlp.experts.3.up_proj.weight"),
        (
            {f"{LAYER}eh_proj.weight": torch.zeros(128, 128)},
            f"tensor {LAYER}eh_proj.weight has shape [128, 128], but config.json makes it [128, 256]",
        ),
    ],
    ids=["a norm is missing", "an expert is missing", "another shape"],
)
def test_an_incomplete_head_is_refused_by_its_tensor(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], told: str
) -> None:
    init_checkpoint(tmp_path / "tiny", preset="tiny", seed=2, architecture="deepseek_v3", mtp_layers=1)
    change(tmp_path / "tiny", changes)
    config = ModelConfig.from_directory(tmp_path / "tiny")
    load_model(tmp_path / "tiny", config)  # it is served without its head
    with pytest.raises(CheckpointInvalid) as raised:
        load_head(tmp_path / "tiny", config)
    assert told in str(raised.value)


def test_a_checkpoint_saved_without_its_head_is_refused_with_the_fix(
    random_head: Headed, tmp_path: Path
) -> None:
    """Quantised copies often keep `num_nextn_predict_layers`, and have no such layer."""
    shutil.copytree(random_head.directory, tmp_path / "tiny")
    found = load_file(tmp_path / "tiny" / "model.safetensors")
    change(tmp_path / "tiny", {name: None for name in found if name.startswith(LAYER)})
    config = ModelConfig.from_directory(tmp_path / "tiny")
    with pytest.raises(CheckpointInvalid, match=r"choose another one, or another .*speculation\.method"):
        load_head(tmp_path / "tiny", config)


def test_it_needs_memory_for_its_weights_on_every_lane(random_head: Headed) -> None:
    directory = random_head.directory
    config = ModelConfig.from_directory(directory)
    weights_bytes, head_bytes = config.weights_bytes(4), config.head_weights_bytes(4)
    assert random_head.head.weights_bytes == pytest.approx(head_bytes, rel=0.02)
    free_bytes = RANK_BYTES + weights_bytes + head_bytes // 2
    require_possible(MedhaReplicaSpec.model_validate({"model": {"name": "m", "source": {"path": str(directory)}}}), directory, free_bytes)  # fmt: skip
    with pytest.raises(ConfigInvalid, match="need at least"):
        require_possible(spec_of(directory), directory, free_bytes)
    needed = 2 * (RANK_BYTES + weights_bytes + head_bytes)
    require_possible(spec_of(directory, kv=2), directory, needed)
    with pytest.raises(ConfigInvalid, match="need at least"):
        require_possible(spec_of(directory, kv=2), directory, needed - head_bytes // 2)


@pytest.mark.parametrize(
    "speculation",
    [{"method": "predictionHead"}, {"method": "promptLookup", "predictionHead": {"kind": "mtp"}}],
)
def test_the_method_and_its_field_belong_together(speculation: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="predictionHead is given if, and only if, method is predictionHead"):
        MedhaReplicaSpec.model_validate(
            {"model": {"name": "m", "source": {"path": "m"}}, "scheduling": {"speculation": speculation}}
        )
