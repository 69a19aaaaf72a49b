"""Real ranks run the steps of a real controller to the end, with the logits of `transformers`, and free all KV.

The controller gets its steps' reports in random order, stage by stage. Then ranks run those steps, as threads of this
process that are connected by gloo. Nothing else connects the two sides, so the test notices any number that they
count differently.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.kv.context_parallel import ContextParallel, PrefillStrategy, RingCosts
from medha.kv.pools import WindowPool
from medha.kv.prefix_cache import PrefixHasher
from medha.scheduler.controller import ReplicaController
from medha.scheduler.replica_config import ReplicaConfig
from medha.topology import Topology
from medha.wire.messages import (
    Cancel,
    ControllerEvent,
    Done,
    Emit,
    Failed,
    FinishReason,
    KvAsk,
    KvDone,
    KvTicket,
    Refused,
    Sample,
    Sampling,
    StageFree,
    Step,
    SteppedAside,
    StepProfile,
    StoreLookup,
    Submit,
)
from medha_worker.device import host_device
from medha_worker.kernels import torch_attention as attention
from medha_worker.kernels.name_table import torch_kernels
from medha_worker.kernels.protocol import Kernels

from ..model.test_model_transformer import save_reference
from ..ranks import Ranks
from .test_exactness import slide

pytestmark = pytest.mark.timeout(400)  # an example may take seconds where other tests run beside it

TOLERANCE = 1e-4
VOCAB = 160
PROFILE = StepProfile(0.001, 0.0001, 1e-7, 0.0001)
MOST_EVENTS = 6000
MODEL = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}

SHAPES = [
    pytest.param(((1, 1, 1), "llama", 40), id="one rank", marks=pytest.mark.long),
    pytest.param(((1, 2, 1), "mistral", 40), id="SPP2", marks=pytest.mark.long),
    pytest.param(((1, 2, 2), "qwen2", 3), id="SPP2 x KVP2"),
    pytest.param(((1, 1, 1), "mistral-window", 2), id="one rank, windows"),
    pytest.param(((1, 1, 2), "mistral-window", 2), id="KVP2, windows"),
] + [
    pytest.param((shape, architecture, 40), id=f"{Topology(*shape)} long", marks=pytest.mark.long)
    for shape, architecture in [
        ((1, 1, 1), "qwen2"),
        ((1, 1, 2), "qwen3"),
        ((1, 1, 4), "llama"),
        ((2, 1, 2), "llama-biased"),
        ((1, 2, 3), "qwen2"),
        ((1, 4, 2), "qwen3"),
        ((2, 2, 2), "mistral"),
        ((1, 2, 1), "gemma3_text-window"),
        ((2, 1, 1), "gemma3_text-window"),
        ((2, 2, 1), "mistral-window"),
        ((1, 1, 3), "gemma3_text-window"),
        ((1, 2, 2), "mistral-window"),
    ]
]


@dataclass
class Query:
    prompt: str
    ids: npt.NDArray[np.int32]
    max_tokens: int | None


@dataclass
class Life:
    """A controller, and everything that it has decided."""

    controller: ReplicaController
    random: Random
    now: float = 0.0
    steps: list[Step] = field(default_factory=list)
    moving: list[tuple[Step, int]] = field(default_factory=list)  # each with its stage
    sampled: dict[str, int] = field(default_factory=dict)
    ends: dict[str, FinishReason | str] = field(default_factory=dict)
    asides: dict[str, SteppedAside] = field(default_factory=dict)  # by the prompt with which each comes back
    messages: list[KvAsk | KvTicket | KvDone] = field(default_factory=list)  # for other replicas
    lookups: list[StoreLookup] = field(default_factory=list)

    def handle(self, event: ControllerEvent) -> None:
        for command in self.controller.handle(event, self.now):
            match command:
                case Step():
                    self.steps.append(command)
                    self.moving.append((command, 0))
                case Emit():
                    self.sampled[command.id] = self.sampled.get(command.id, 0) + len(command.tokens)
                    if command.finish_reason is not None:
                        self.end(command.id, command.finish_reason)
                case Refused() | Failed():
                    self.end(command.id, command.reason)
                case SteppedAside():
                    self.asides[command.prompt] = command
                case KvAsk() | KvTicket() | KvDone():
                    self.messages.append(command)
                case StoreLookup():
                    self.lookups.append(command)

    def end(self, name: str, reason: str) -> None:
        assert name not in self.ends, f"{name} ends twice"
        self.ends[name] = reason

    def move(self) -> None:
        """Let a random step leave its stage, if no other step of its lanes is ahead of it there."""
        last = max(
            self.controller.config.topology.stream - 1, 1
        )  # after a single stage, tokens are still sampled
        order = list(range(len(self.moving)))
        self.random.shuffle(order)
        for index in order:
            step, stage = self.moving[index]
            ahead = [at for other, at in self.moving[:index] if set(other.lanes) & set(step.lanes)]
            if ahead and (stage == last or min(ahead) <= stage + 1):
                continue
            self.now += 0.01
            if stage == last:
                del self.moving[index]
                self.handle(self.outcome(step))
                return
            self.moving[index] = step, stage + 1
            if stage == 0:
                self.handle(StageFree(step.step_id, 0, step.lanes))
            return
        raise AssertionError("nothing moves")

    def outcome(self, step: Step) -> Done:
        """Return what ranks report of a step; the tokens do not matter."""
        samples = tuple(Sample(entry.id, 7) for entry in step.entries if entry.samples)
        return Done(step.step_id, samples, (), 0.001, step.lanes)


GREEDY = Sampling(temperature=0.0, ignore_eos=True)


def live(life: Life, sampling: Sampling, asked: dict[str, Query]) -> None:
    """Let a controller serve random requests to the end, and add them to `asked`; some begin with the same tokens."""
    config, random = life.controller.config, life.random
    hasher = PrefixHasher(config.block_size_tokens, b"secret")
    for number in range(random.randint(2, 7)):
        block, share = config.block_size_tokens, config.tokens_per_lane
        most = min(config.pool_tokens - 20, 160)
        tokens = random.choice(
            [1, 2, block, 3 * block + 1, random.randint(1, 40), share, share + 1, 2 * share, most]
        )
        ids = np.random.default_rng(random.randint(0, 1)).integers(0, VOCAB, max(1, min(tokens, most)))
        if random.random() < 0.3:  # only its beginning is shared
            ids[len(ids) // 2 :] = np.random.default_rng(50 + number).integers(
                0, VOCAB, len(ids) - len(ids) // 2
            )
        max_tokens = random.choice([None, 1, 2, 5, 12])
        for sample in range(random.choice([1, 1, 2, 3])):
            asked[f"r{number}.{sample}"] = Query(f"p{number}", ids.astype(np.int32), max_tokens)
    waiting = list(asked)
    cancels = random.random() < 0.5
    for _ in range(MOST_EVENTS):
        if not waiting and not life.moving:
            break
        chance = random.random()
        running = [name for name in asked if name not in waiting and name not in life.ends]
        if waiting and (chance < 0.35 or not life.moving):
            name = waiting.pop(0)
            one = asked[name]
            life.handle(
                Submit(
                    name, one.prompt, len(one.ids), len(one.ids), seed=1, sample_index=int(name.partition(".")[2]),
                    sampling=replace(sampling, max_tokens=one.max_tokens),
                    block_hashes=hasher.hashes(one.ids), age_seconds=random.choice([0.0, 5.0]),
                )
            )  # fmt: skip
        elif cancels and running and chance < 0.38:
            name = random.choice(running)
            life.end(name, "cancelled")
            life.handle(Cancel(name))
        elif life.moving:
            life.move()
    assert set(life.ends) == set(asked), "not all have ended"
    assert life.controller.idle
    assert life.controller.pools.held_blocks == 0


def pool_of_windows(config: ReplicaConfig, window_tokens: int, sequences: int | None = None) -> int:
    """Return the blocks that ranks make for layers with this window, for all sequences that may run or for fewer."""
    running = config.scheduling.max_running if sequences is None else sequences
    return config.window_need(window_tokens).of(running)


def extend_greedily(reference: torch.nn.Module, ids: list[int], tokens: int) -> list[int]:
    """Append the most probable tokens until there are `tokens`, and return the list."""
    with torch.inference_mode():
        while len(ids) < tokens:
            ids.append(int(reference(torch.tensor(ids)[None]).logits[0, -1].argmax()))
    return ids


@pytest.fixture(params=SHAPES)
def replica(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Ranks, torch.nn.Module, int]]:
    shape, architecture, examples = request.param
    directory: Path = tmp_path_factory.mktemp(architecture)
    head_dim = {} if architecture == "qwen2" else {"head_dim": 16}
    reference = save_reference(directory, architecture, **MODEL, **head_dim)
    ranks = Ranks(Topology(*shape), directory)
    yield ranks, reference, examples
    ranks.close()


def test_ranks_run_to_the_end_what_the_controller_decides(
    replica: tuple[Ranks, torch.nn.Module, int],
) -> None:
    """Requests without a limit grow beyond their reservation, over blocks and lanes, and step aside for each other.

    KV before windows is freed. The pool for them is just as large as ranks make it.
    """
    ranks, reference, examples = replica
    topology = ranks.topology
    asides: list[str] = []

    @given(
        strategy=st.sampled_from([None, "passKv", "passQ", "auto", "striped"]),
        block_tokens=st.sampled_from([4, 4, 1, 8]),
        pool_tokens=st.sampled_from([48, 80, 160, 400]),
        share_blocks=st.sampled_from([2, 4, 15]),
        chunk_tokens=st.sampled_from([8, 16, 64]),
        output_tokens=st.sampled_from([2, 5, 9]),
        max_running=st.sampled_from([4, 16]),
        seed=st.integers(0, 10_000),
        steps_ahead=st.integers(0, 2),
        kernels=st.sampled_from([torch_kernels(host_device(torch.float32)), None]),
        window=st.sampled_from([1, 3, 8, 20, 50]),
        prefix_caching=st.booleans(),
    )
    @example(  # on every grid a request steps aside
        strategy=None,
        block_tokens=4,
        pool_tokens=48,
        share_blocks=4,
        chunk_tokens=16,
        output_tokens=2,
        max_running=16,
        seed=9,
        steps_ahead=1,
        kernels=None,
        window=8,
        prefix_caching=True,
    )
    @settings(max_examples=examples, deadline=None)
    def run(
        strategy: PrefillStrategy | None,
        block_tokens: int,
        pool_tokens: int,
        share_blocks: int,
        chunk_tokens: int,
        output_tokens: int,
        max_running: int,
        seed: int,
        steps_ahead: int,
        kernels: Kernels | None,
        window: int,
        prefix_caching: bool,
    ) -> None:
        slide(ranks, reference, window)
        frees = any(ranks.windows)
        striped = strategy is not None and topology.kv > 1
        config = ReplicaConfig(
            topology=topology,
            scheduling=SchedulingSpec(
                max_chunk_tokens=chunk_tokens, min_chunk_tokens=4, max_running=max_running, max_running_long=2
            ),
            service_classes={
                "default": ServiceClass(
                    name="default",
                    default_output_tokens=output_tokens,
                    ttft_floor_seconds=2.0 if seed % 3 else 0.001,  # decodes run ahead at once, or late
                )
            },
            default_class="default",
            max_model_len=200,
            block_size_tokens=block_tokens,
            kv_blocks=pool_tokens // block_tokens,
            long_threshold_tokens=60,
            tokens_per_lane=share_blocks * block_tokens,
            prefix_caching=prefix_caching,
            context_parallel=ContextParallel(strategy, RingCosts(8, 2)) if striped and strategy else None,
        )
        if frees:
            config = replace(config, window_pool=WindowPool(pool_of_windows(config, window), window))
        life, asked = Life(ReplicaController(config, PROFILE), Random(seed)), dict[str, Query]()
        live(life, GREEDY, asked)
        asides.extend(life.asides)
        prompts = {one.prompt: one.ids for one in asked.values()}
        texts: dict[
            str, list[int]
        ] = {}  # of requests that stepped aside: prompt, and what the reference adds
        for aside in life.asides.values():
            ids = texts.setdefault(aside.id, asked[aside.id].ids.tolist())
            extend_greedily(reference, ids, aside.tokens)
            prompts[aside.prompt] = np.array(ids[: aside.tokens], dtype=np.int32)
        samples, logits = ranks.run(
            life.steps, prompts,
            kv_blocks=config.kv_blocks, block_tokens=block_tokens, steps_ahead=steps_ahead,
            kernels=kernels, window_blocks=config.window_pool.blocks if config.window_pool else 0,
        )  # fmt: skip
        for name, one in asked.items():
            sampled = [sample.token for sample in samples if sample.id == name]
            assert life.ends[name] in ("length", "cancelled"), f"{name}: {life.ends[name]}"
            if life.ends[name] == "length" and name not in texts:
                assert len(sampled) == life.sampled[name]
            computed = sorted(position for request, position in logits if request == name)
            if not computed:
                continue
            text = [*one.ids.tolist(), *sampled]
            if name in texts:
                text = extend_greedily(reference, texts[name], computed[-1] + 1)
            ids = torch.tensor(text)[: computed[-1] + 1]
            with torch.inference_mode():
                wanted = reference(ids[None]).logits[0]
            found = torch.stack([logits[name, position] for position in computed])
            assert float((found - wanted[computed]).abs().max()) <= TOLERANCE, name

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_IN_PLACE_TOKENS", 8)  # the pools are small
        patch.setattr(attention, "_GATHERED_TOKENS", 32)
        run()
    assert asides, "none stepped aside"
