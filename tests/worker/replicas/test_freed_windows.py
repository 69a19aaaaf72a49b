"""A controller and a rank that frees KV before windows: who may fork, and that no block is left behind."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.api.speculation_spec import SpeculationSpec
from medha.errors import PartFailed
from medha.kv.blocks import BlockLedger
from medha.kv.pools import WindowPool
from medha.kv.prefix_cache import PrefixHasher
from medha.kv.window_tables import WindowTables
from medha.scheduler.controller import ReplicaController
from medha.scheduler.replica_config import ReplicaConfig
from medha.topology import Topology
from medha.wire.messages import Admit, Cancel, Done, Sample, Step, Submit, Tokens
from medha_worker.rank.lane_plan import plan_lane
from medha_worker.rank.lane_state import LaneState
from medha_worker.rank.sampled_tokens import new_samplers

from .test_controlled import GREEDY, PROFILE, VOCAB, Life, pool_of_windows

WINDOW = 20
HASHER = PrefixHasher(4, b"secret")
CONFIG = ReplicaConfig(
    topology=Topology(1, 1, 1),
    scheduling=SchedulingSpec(
        max_chunk_tokens=16,
        min_chunk_tokens=4,
        max_running=6,
        speculation=SpeculationSpec(method="promptLookup"),
    ),
    service_classes={"default": ServiceClass(name="default", default_output_tokens=9)},
    default_class="default",
    max_model_len=200,
    block_size_tokens=4,
    kv_blocks=120,
    long_threshold_tokens=100,
    prefix_caching=False,
)
CONFIG = replace(CONFIG, window_pool=WindowPool(pool_of_windows(CONFIG, WINDOW), WINDOW))


class Rank:
    """The tables of a rank that computes nothing."""

    def __init__(self, config: ReplicaConfig) -> None:
        ledger = BlockLedger(config.kv_blocks, config.block_size_tokens)
        assert config.window_pool is not None
        self.tables = WindowTables(ledger, config.window_pool.blocks, WINDOW)
        samplers = new_samplers(VOCAB, (), lambda _: None)
        self.state = LaneState(ledger, 0, 0, samplers, self.tables)

    def replay(self, step: Step) -> None:
        """Apply and plan a step."""
        self.state.release(step)
        for name in self.state.missing_prompts(step):
            tokens = next(admit.tokens for admit in step.admits if admit.prompt == name)
            ids = np.zeros(tokens, dtype=np.int32)
            self.state.add_tokens(Tokens(prompt=name, offset=0, total=tokens), ids)
        plan = plan_lane(step, self.state, self.state.reserve(step), (None, WINDOW))
        assert plan.failures == ()
        for one in plan.entries:
            one.sequence.advance(one.stop, samples=one.entry.samples, drafted=len(one.entry.drafts))
        self.tables.check()


class Guessed(Life):
    """A controller whose ranks find a random number of its guesses right."""

    def outcome(self, step: Step) -> Done:
        samples, drafts = [], []
        for entry in step.entries:
            if entry.samples:
                right = self.random.randint(0, len(entry.drafts))
                samples += [Sample(entry.id, token) for token in (*entry.drafts[:right], 7)]
                drafts.append((entry.id, tuple(self.random.choices(range(9), k=self.random.randint(0, 4)))))
        return Done(step.step_id, tuple(samples), (), 0.001, step.lanes, drafts=tuple(drafts))


def submit(life: Life, prompt: str, sample: int, tokens: int, max_tokens: int | None = None) -> str:
    name = f"{prompt}.{sample}"
    sampling = replace(GREEDY, max_tokens=max_tokens)
    hashes = HASHER.hashes(np.zeros(tokens, dtype=np.int32))
    life.handle(Submit(name, prompt, tokens, tokens, 1, sample, sampling=sampling, block_hashes=hashes))
    return name


@pytest.mark.parametrize("windows", [6, 3])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("stages", [1, 3])
def test_after_200_cancels_no_block_is_held(stages: int, prefix_caching: bool, windows: int) -> None:
    """Prompts have up to three samples, more than places allow, and begin alike; drafts are accepted in part."""
    config = replace(CONFIG, topology=Topology(1, stages, 1), prefix_caching=prefix_caching)
    config = replace(config, window_pool=WindowPool(pool_of_windows(config, WINDOW, windows), WINDOW))
    life, rank, random = Guessed(ReplicaController(config, PROFILE), Random(1)), Rank(config), Random(2)
    open_: list[str] = []
    cancelled = replayed = prompts = drafted = 0
    while cancelled < 200 or life.moving:
        if len(open_) < 12 and cancelled < 200 and random.random() < 0.4:
            prompts += 1
            tokens = random.choice([1, 5, 19, 20, 21, 60, random.randint(1, 120)])
            samples, most = random.choice([1, 2, 3]), random.choice([None, 3, 40])
            open_ += [submit(life, f"p{prompts}", sample, tokens, most) for sample in range(samples)]
        open_ = [name for name in open_ if name not in life.ends]
        if open_ and (random.random() < 0.15 or cancelled >= 200):
            name = open_.pop(random.randrange(len(open_)))
            life.end(name, "cancelled")
            life.handle(Cancel(name))
            cancelled += 1
        elif life.moving:
            life.move()
        for step in life.steps[replayed:]:
            rank.replay(step)
            drafted += sum(len(entry.drafts) for entry in step.entries)
        replayed = len(life.steps)
    assert life.controller.idle
    assert life.controller.pools.held_blocks == rank.state.ledger.held_blocks == 0
    assert rank.tables.held_blocks == 0
    forks = [admit for step in life.steps for admit in step.admits if admit.fork_of is not None]
    assert forks, "no prompt was shared"
    hits = [admit for step in life.steps for admit in step.admits if admit.cached_tokens]
    assert bool(hits) is prefix_caching
    assert drafted, "nothing was drafted"


def lives(config: ReplicaConfig) -> Life:
    return Life(ReplicaController(config, PROFILE), Random(0))


def admits(life: Life) -> dict[str, Admit]:
    return {admit.id: admit for step in life.steps for admit in step.admits}


@pytest.mark.parametrize("frees", [False, True])
def test_a_sample_shares_its_prompt_until_the_first_one_has_continued(frees: bool) -> None:
    life = lives(replace(CONFIG, window_pool=CONFIG.window_pool if frees else None))
    first, second = submit(life, "p", 0, 60, 40), submit(life, "p", 1, 60, 40)
    while life.sampled.get(second, 0) < 3:
        life.move()
    third = submit(life, "p", 2, 60, 40)
    while life.sampled.get(third, 0) < 3:
        life.move()
    found = admits(life)
    assert found[second].fork_of == first
    assert found[third].fork_of == (None if frees else first)
    if frees:
        rank = Rank(life.controller.config)
        for step in life.steps:
            rank.replay(step)


def test_a_fork_of_a_window_that_is_gone_shows_that_rank_and_controller_disagree() -> None:
    life = lives(replace(CONFIG, window_pool=None))
    first = submit(life, "p", 0, 60, 60)
    while life.sampled.get(first, 0) < 30:
        life.move()
    second = submit(life, "p", 1, 60, 3)
    while second not in admits(life):
        life.move()
    assert admits(life)[second].fork_of == first
    rank = Rank(CONFIG)
    *before, last = (replace(step, state_hash=None) for step in life.steps)  # these show it, too
    for step in before:
        rank.replay(step)
    with pytest.raises(PartFailed, match=rf"{first} has freed the window that {second} is to share"):
        rank.replay(last)
