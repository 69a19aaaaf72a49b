"""A controller and a rank with a draft model or a prediction head, in one process: texts are those without it, and it saves steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.api.speculation_spec import SpeculationSpec
from medha.kv.prefix_cache import PrefixHasher
from medha.scheduler.controller import ReplicaController
from medha.scheduler.replica_config import ReplicaConfig
from medha.topology import Topology
from medha.wire.frames import decode, encode
from medha.wire.messages import (
    Cancel,
    ControllerCommand,
    ControllerEvent,
    Done,
    DraftCosts,
    Emit,
    Sampling,
    StageFree,
    Step,
    StepProfile,
    Submit,
    Tokens,
)
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.controller.lock_step import LockStep
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.prediction_head import PredictionHead
from medha_worker.model.transformer import Transformer
from medha_worker.rank.drafter import Drafter
from medha_worker.rank.executor import Executor
from medha_worker.rank.head_drafter import HeadDrafter
from medha_worker.rank.lane_plan import LanePlan

from ..eagle3_reference import make_always_right, make_target_forget
from ..model.test_eagle3_head import headed, make
from ..model.test_prediction_head import make_right
from ..models import load_head, load_model
from ..rank.test_executor import VOCAB, random_ids

BLOCKS, BLOCK_TOKENS = 80, 4
READS_WEIGHTS = StepProfile(0.01, 1e-6, 1e-9, 1e-6)
"""A device on which verifying guesses costs next to nothing."""
SAMPLINGS = [
    Sampling(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=1),
    Sampling(temperature=0.9, max_tokens=25, ignore_eos=True, top_p=0.95),
    Sampling(temperature=0.7, max_tokens=28, ignore_eos=True, frequency_penalty=0.3),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Transformer]:
    found = {}
    for name, seed in (("itself", 2), ("another", 77)):
        directory: Path = tmp_path_factory.mktemp(name) / "tiny"
        init_checkpoint(directory, preset="tiny", seed=seed)
        found[name] = load_model(directory, ModelConfig.from_directory(directory, max_model_len=256))
    return found


DRAFT_MODEL: dict[str, object] = {"method": "draftModel", "draftModel": {"path": "draft"}}
HEAD: dict[str, object] = {"method": "predictionHead", "predictionHead": {"kind": "mtp"}}


def config_of(speculation: dict[str, object]) -> ReplicaConfig:
    return ReplicaConfig(
        topology=Topology(),
        scheduling=SchedulingSpec(
            max_chunk_tokens=16,
            min_chunk_tokens=4,
            max_running=8,
            speculation=SpeculationSpec.model_validate(speculation),
        ),
        service_classes={"default": ServiceClass(name="default", tpot_target_seconds=5)},
        default_class="default",
        max_model_len=256,
        block_size_tokens=BLOCK_TOKENS,
        kv_blocks=BLOCKS,
        long_threshold_tokens=1000,
        draft_costs=DraftCosts(0.0005, 1e-5, 1e-6) if speculation else None,
    )


@dataclass
class Replica:
    """A controller and its only rank; a step is planned when it comes, and run when all before it have ended."""

    model: Transformer
    draft: Transformer | None
    prompts: dict[str, np.ndarray] = field(default_factory=dict)
    texts: dict[str, list[int]] = field(default_factory=dict)
    log: list[tuple[float, ControllerEvent]] = field(default_factory=list)
    commands: list[list[ControllerCommand]] = field(default_factory=list)
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        head = self.draft if isinstance(self.draft, PredictionHead) else None
        drafts = DRAFT_MODEL if head is None else HEAD
        self.config = config_of({} if self.draft is None else drafts)
        self.controller = ReplicaController(self.config, READS_WEIGHTS)
        kv_cache = self.model.new_kv_cache(BLOCKS, BLOCK_TOKENS, head=head)
        drafter: Drafter | HeadDrafter | None = None
        if head is not None:
            drafter = HeadDrafter(head, kv_cache.last_layer(), self.model)
        elif self.draft is not None:
            drafter = Drafter(self.draft, self.draft.new_kv_cache(BLOCKS, BLOCK_TOKENS), VOCAB)
        self.executor = Executor(
            self.model,
            kv_cache,
            vocab_size=VOCAB,
            eos_token_ids=(1,),
            clock=lambda: 0.0,
            drafter=drafter,
        )
        self.hasher = PrefixHasher(BLOCK_TOKENS, b"secret")
        self.joins = LockStep()
        self.now = 0.0
        self.planned: deque[LanePlan] = deque()

    def submit(self, name: str, ids: np.ndarray, sampling: Sampling, prompt: str, sample_index: int) -> None:
        self.prompts[prompt] = ids
        hashes = self.hasher.hashes(ids)
        self.handle(
            Submit(name, prompt, len(ids), len(ids), 7, sample_index, sampling=sampling, block_hashes=hashes)
        )

    def handle(self, event: ControllerEvent) -> None:
        """Give the controller an event as it is recorded: in the frames of the wire."""
        read, _ = decode(encode(event))  # type: ignore[arg-type]
        assert read == event
        self.log.append((self.now, event))
        commands = self.controller.handle(event, self.now)
        self.commands.append(commands)
        for command in commands:
            if isinstance(command, Emit):
                self.texts.setdefault(command.id, []).extend(command.tokens)
            elif isinstance(command, Step):
                self.joins.expect(command, self.now)
                self.executor.prepare(command)
                for prompt in self.executor.missing_prompts(command):
                    ids = self.prompts[prompt]
                    self.executor.add_tokens(Tokens(prompt=prompt, offset=0, total=len(ids)), ids)
                self.planned.append(self.executor.plan(command))

    def advance(self) -> bool:
        """Run the oldest step; False if there is none."""
        if not self.planned:
            return False
        plan = self.planned.popleft()
        done = self.executor.run(plan)
        self.now += 0.01
        if done is None:
            return True
        self.steps += 1
        drafts = {entry.id: entry.drafts for entry in plan.step.entries}
        self.drafted += sum(map(len, drafts.values()))
        self.accepted += len(done.samples) - len({sample.id for sample in done.samples})
        assert self.joins.contradiction(done, epoch=0, vocab_size=VOCAB) is None
        self.handle(StageFree(plan.step.step_id, 0))
        joined = self.joins.join(done)
        assert isinstance(joined, Done)
        self.handle(joined)
        return True


def served(model: Transformer, draft: Transformer | None) -> Replica:
    """Serve prompts that come one after the other: some fork, one is cancelled, and one begins with a cached prompt."""
    replica = Replica(model, draft)
    for index, sampling in enumerate(SAMPLINGS):
        for sample in range(1 + index % 2):
            replica.submit(
                f"r{index}.{sample}", random_ids(23 + 9 * index, index), sampling, f"p{index}", sample
            )
        for _ in range(3):
            replica.advance()
    replica.submit("gone", random_ids(30, 9), SAMPLINGS[0], "p9", 0)
    for _ in range(6):
        replica.advance()
    replica.handle(Cancel("gone"))
    while replica.advance():
        pass
    replica.texts.pop("gone", None)
    longer = np.concatenate(
        [random_ids(23, 0), np.array(replica.texts["r0.0"], dtype=np.int32), random_ids(5, 4)]
    )
    replica.submit("again", longer, SAMPLINGS[1], "p8", 0)
    while replica.advance():
        pass
    assert replica.controller.idle
    assert replica.controller.ledger.held_blocks == 0
    assert replica.executor.ledger.held_blocks == 0
    return replica


@pytest.mark.timeout(600)
def test_texts_are_the_same_and_a_record_replays(models: dict[str, Transformer]) -> None:
    plain = served(models["itself"], None)
    assert len(plain.texts) == 5
    assert all(len(text) >= 25 for text in plain.texts.values())
    for name, draft in models.items():
        found = served(models["itself"], draft)
        assert found.texts == plain.texts
        assert found.drafted > 0
        if name == "itself":
            assert found.accepted > 0.8 * found.drafted, "only penalties of guesses are not followed"
            assert found.steps < 0.7 * plain.steps
        fresh = ReplicaController(found.config, READS_WEIGHTS)
        assert [fresh.handle(event, now) for now, event in found.log] == found.commands


@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_right", [True, False], ids=["always right", "random"])
def test_texts_with_a_head_are_the_same_and_a_record_replays(tmp_path: Path, *, is_right: bool) -> None:
    directory = tmp_path / "tiny"
    init_checkpoint(directory, preset="tiny", seed=2, architecture="deepseek_v3", mtp_layers=1)
    if is_right:
        make_right(directory)
    config = ModelConfig.from_directory(directory, max_model_len=256)
    assert_served(load_model(directory, config), load_head(directory, config), is_right=is_right)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_right", [True, False], ids=["always right", "random"])
def test_texts_with_an_eagle3_head_are_the_same_and_a_record_replays(
    tmp_path: Path, *, is_right: bool
) -> None:
    make(tmp_path, "qwen3")
    if is_right:
        make_target_forget(tmp_path / "tiny")
        make_always_right(tmp_path / "head", tmp_path / "tiny")
    one = headed(tmp_path, max_model_len=256)
    assert_served(one.model, one.head, is_right=is_right)


def assert_served(model: Transformer, head: PredictionHead, *, is_right: bool) -> None:
    plain, found = served(model, None), served(model, head)
    assert len(plain.texts) == 5
    assert found.texts == plain.texts
    assert found.drafted > 0
    if is_right:
        assert found.accepted > 0.8 * found.drafted, "only penalties of guesses are not followed"
        assert found.steps < 0.7 * plain.steps
    fresh = ReplicaController(found.config, READS_WEIGHTS)
    assert [fresh.handle(event, now) for now, event in found.log] == found.commands
