"""The store at the controller: who asks what is there, who waits for it, what is written, and what happens after faults."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.kv.disk_tier import MOST_CONSIDERED
from medha.kv.prefix_cache import HASH_CHARACTERS, PrefixHasher
from medha.kv.store_tier import Offer, Offers, StoreTier, object_blocks
from medha.scheduler.controller import ReplicaController
from medha.scheduler.replica_config import ReplicaConfig
from medha.scheduler.tier_report import copied_bytes
from medha.topology import Topology
from medha.wire.frames import decode, digest, encode
from medha.wire.messages import (
    Cancel,
    ControllerEvent,
    DiskReport,
    Done,
    HostTierFigures,
    Sample,
    Sampling,
    StageFree,
    Step,
    StepEntry,
    StepProfile,
    StoreLookup,
    StoreWrite,
    Submit,
    Tick,
)

SIZE, HOST_BLOCKS, OBJECT_BLOCKS = 4, 120, 5
HASHER = PrefixHasher(SIZE, b"shared")
SLOW = StepProfile(0.001, 0.01, 1e-7, 0.0001)
MIDDLE = StepProfile(0.001, 0.001, 1e-7, 0.0001)
FAST = StepProfile(0.001, 1e-6, 1e-9, 0.0001)
Ids = np.ndarray[tuple[int], np.dtype[np.int32]]


def ids(seed: int, tokens: int) -> Ids:
    return np.random.default_rng(seed).integers(0, 1000, tokens).astype(np.int32)


PROMPT = ids(1, 101)  # 25 whole blocks, five objects


@dataclass
class Replica:
    """A controller with two ranks, which run each step at once; the tests play what they report of the store."""

    profile: StepProfile = SLOW
    host_blocks: int = HOST_BLOCKS
    writes_at_once: bool = True
    copy_seconds: float = 1e-7  # of a block
    output_tokens: int = 1
    lost_at_tokens: float = inf  # length of a text at which its ranks are lost
    is_as_fast_as_predicted: bool = False  # else each step takes a millisecond
    now: float = 0.0
    lookups: list[StoreLookup] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    stored_at: list[int] = field(
        default_factory=list
    )  # length of the longest text when an object was sent to be written
    log: list[tuple[ControllerEvent, float, str]] = field(default_factory=list)
    admitted: dict[str, int] = field(default_factory=dict)  # request -> cached tokens
    texts: dict[str, Ids] = field(default_factory=dict)  # request -> its prompt and output

    def __post_init__(self) -> None:
        self.core = self.new_core()
        self._launched = deque[Step]()
        self._is_running = False

    def new_core(self) -> ReplicaController:
        config = ReplicaConfig(
            topology=Topology(2, 1, 1),
            scheduling=SchedulingSpec(),
            service_classes={"default": ServiceClass(name="default", default_output_tokens=4)},
            default_class="default",
            max_model_len=2000,
            block_size_tokens=SIZE,
            kv_blocks=200,
            long_threshold_tokens=10_000,
            host_tier=HostTierFigures(self.host_blocks, 100, 1e-7, self.copy_seconds),
            store_block_seconds=1e-6,
            object_blocks=OBJECT_BLOCKS,
        )
        return ReplicaController(config, self.profile)

    def handle(self, event: ControllerEvent) -> None:
        commands = self.core.handle(event, self.now)
        self.log.append((event, self.now, digest(commands)))
        for command in commands:
            match command:
                case Step() as step:
                    self.steps.append(step)
                    self.stored_at += [self.longest] * len(step.stores)
                    self._launched.append(step)
                    self.admitted |= {one.id: one.cached_tokens for one in step.admits}
                case StoreLookup() as lookup:
                    self.lookups.append(lookup)
                case _:
                    pass
        if self._launched and not self._is_running:
            self._is_running = True
            while self._launched and self.longest < self.lost_at_tokens:
                self.run(self._launched.popleft())
            self._is_running = False

    def run(self, step: Step) -> None:
        samples = tuple(self.sample(one) for one in step.entries if one.samples)
        self.handle(StageFree(step.step_id, 0))
        seconds = step.predicted_seconds if self.is_as_fast_as_predicted else 0.001
        self.handle(Done(step.step_id, samples, (), seconds, block_hashes=self.filled(samples)))
        if self.writes_at_once:
            self.report(stored=tuple(one.object.name for one in step.stores))

    def report(self, **fields: object) -> None:
        """Let both ranks report the same."""
        if any(fields.values()):
            for rank in range(2):
                self.handle(DiskReport(rank, **fields))  # type: ignore[arg-type]

    def submit(self, name: str, prompt: Ids = PROMPT, salt: str = "") -> None:
        self.texts[name] = prompt
        hashes = HASHER.hashes(prompt, salt)
        count = len(prompt)
        self.handle(
            Submit(
                name, name, count, count, seed=1,
                sampling=Sampling(max_tokens=self.output_tokens), block_hashes=hashes,
            )
        )  # fmt: skip

    def sample(self, entry: StepEntry) -> Sample:
        """Let an entry sample a 7; the last one that its request may have ends it."""
        request = self.core.find(entry.id)
        assert request is not None
        prompt = self.texts.get(entry.id, np.zeros(request.submit.tokens, np.int32))
        text = self.texts[entry.id] = np.append(prompt, np.int32(7))
        return Sample(entry.id, 7, "length" if len(text) == request.limit_tokens else None)

    def filled(self, samples: tuple[Sample, ...]) -> tuple[tuple[str, str], ...]:
        """Return the hashes of the blocks that samples have filled."""
        full = (one.id for one in samples if len(self.texts[one.id]) % SIZE == 0)
        return tuple((name, HASHER.hashes(self.texts[name])[-HASH_CHARACTERS:]) for name in full)

    @property
    def longest(self) -> int:
        """Length of the longest prompt with its output."""
        return max(map(len, self.texts.values()), default=0)

    @property
    def store(self) -> StoreTier:
        store = self.core.pools.store
        assert store is not None
        return store

    @property
    def stores(self) -> list[StoreWrite]:
        return [one for step in self.steps for one in step.stores]

    @property
    def loads(self) -> list[tuple[str, int, int]]:
        """Object, first block and number of blocks of every load from the store."""
        return [
            (load.file, load.start, load.count)
            for step in self.steps
            for load in step.loads
            if load.is_stored and load.count
        ]


def written(prompt: Ids = PROMPT) -> list[str]:
    """Return the objects that a replica writes of a prompt."""
    replica = Replica()
    replica.submit("a", prompt)
    replica.report(looked_up=((0, 0),))
    return [one.object.name for one in replica.stores]


def test_a_prompt_waits_for_what_the_store_has_and_computes_the_rest() -> None:
    reader = Replica()
    reader.submit("q")
    assert reader.admitted == {}, "it waits for the answer"
    (lookup,) = reader.lookups
    assert list(lookup.objects) == written()
    assert len(lookup.objects) == 5
    reader.handle(DiskReport(0, looked_up=((lookup.number, 5),)))
    assert reader.loads == [], "the other rank may have less"
    reader.handle(DiskReport(1, looked_up=((lookup.number, 3),)))
    assert reader.loads == [(name, 0, OBJECT_BLOCKS) for name in lookup.objects[:3]]
    assert reader.admitted == {}
    reader.report(loaded=((0, 0.01), (1, 0.01), (2, 0.01)))
    assert reader.admitted == {"q": 3 * OBJECT_BLOCKS * SIZE}
    assert reader.store.counts.hits == 1
    assert reader.store.counts.loaded_blocks == 3 * OBJECT_BLOCKS
    assert [one.object.name for one in reader.stores] == list(lookup.objects[3:]), "the others are there"
    avoided_seconds = reader.core.pools.avoided_prefill_seconds
    assert [name for name, seconds in avoided_seconds.items() if seconds] == ["store"]
    assert avoided_seconds["store"] == pytest.approx(
        3 * OBJECT_BLOCKS * SIZE * SLOW.linear_seconds_per_token, rel=0.1
    )
    reader.store.check()


@pytest.mark.parametrize(("later_seconds", "lookups"), [(29.0, 1), (31.0, 2)])
def test_what_was_not_there_is_not_asked_for_again_for_a_while(later_seconds: float, lookups: int) -> None:
    replica = Replica()
    replica.submit("a")
    replica.handle(Cancel("a"))
    replica.report(looked_up=((0, 0),))
    replica.now += later_seconds
    replica.submit("b", np.concatenate([PROMPT[: OBJECT_BLOCKS * SIZE], ids(2, 81)]))
    assert len(replica.lookups) == lookups
    assert ("b" in replica.admitted) == (lookups == 1)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"profile": FAST}, "computing is faster than reading"),
        ({"host_blocks": 2}, "nothing"),
    ],
)
def test_fast_models_neither_ask_nor_write(fields: dict[str, object], why: str) -> None:
    replica = Replica(**fields)  # type: ignore[arg-type]
    replica.submit("a")
    if why == "nothing":  # there is hardly a host tier: it asks, and nothing can be loaded or written
        replica.report(looked_up=((0, 5),))
    else:
        assert replica.lookups == []
    assert "a" in replica.admitted or replica.loads
    assert replica.stores == []


def test_an_object_that_vanished_is_computed_and_written_again() -> None:
    reader = Replica()
    reader.submit("q")
    reader.report(looked_up=((0, 5),))
    reader.report(loaded=((0, 0.01), (1, 0.01)), not_loaded=(2, 3, 4))
    assert reader.admitted == {"q": 2 * OBJECT_BLOCKS * SIZE}
    assert reader.store.counts.failed_loads == 3
    assert [one.object.name for one in reader.stores] == list(reader.lookups[0].objects[2:])
    assert not reader.store.rests, "the store itself is sound"


@pytest.mark.parametrize("there", [0, 3])
def test_what_a_replica_has_written_and_the_store_has_deleted_is_written_again(there: int) -> None:
    replica, names = Replica(), written()
    for name in names:
        replica.store.know(name)  # as if it had written them long ago
    replica.submit("a")
    replica.report(looked_up=((0, there),))
    replica.report(loaded=tuple((extent, 0.01) for extent in range(there)))
    assert replica.admitted == {"a": there * OBJECT_BLOCKS * SIZE}
    assert [one.object.name for one in replica.stores] == names[there:]
    replica.store.check()


def test_equal_prompts_ask_once() -> None:
    reader = Replica()
    reader.handle(submit_of("one", "shared"))
    reader.handle(submit_of("two", "shared"))
    assert len(reader.lookups) == 1
    reader.report(looked_up=((0, 0),))
    assert reader.admitted.keys() == {"one", "two"}


def submit_of(name: str, prompt: str) -> Submit:
    return Submit(
        name, prompt, 101, 101, seed=1, sampling=Sampling(max_tokens=1), block_hashes=HASHER.hashes(PROMPT)
    )


def test_objects_are_read_when_they_are_due_for_the_first_of_the_requests_that_wait_for_them() -> None:
    reader = Replica()
    for name, seconds in (("late", 60.0), ("soon", 20.0), ("later", 90.0)):
        reader.handle(replace(submit_of(name, "shared"), deadline_after_seconds=seconds))
    reader.report(looked_up=((0, 5),))
    dues = [load.due for step in reader.steps for load in step.loads if load.is_stored]
    assert dues == [20.0] * 5


def test_keys_with_a_salt_of_their_own_share_nothing() -> None:
    reader = Replica()
    reader.submit("q", salt="another key")
    assert not set(reader.lookups[0].objects) & set(written())


def test_a_store_that_fails_is_left_alone_longer_and_longer_and_then_used_again() -> None:
    replica = Replica()
    rests: list[float] = []
    for number in range(8):
        replica.submit(f"a{number}", ids(10 + number, 101))
        assert len(replica.lookups) == number + 1
        replica.report(looked_up=((number, 0),), store_fault="it answers 500")
        assert f"a{number}" in replica.admitted, "it computes instead"
        assert replica.store.rests
        assert replica.core.store_kv.fault == "it answers 500"
        replica.submit(f"b{number}", ids(30 + number, 101))
        assert len(replica.lookups) == number + 1, "nobody asks"
        due = replica.core.store_kv.next_due
        assert due is not None
        rests.append(due - replica.now)
        replica.now = due
        replica.handle(Tick())
        assert not replica.store.rests
    assert rests == [5, 10, 20, 40, 80, 160, 300, 300]
    assert replica.stores == []
    replica.submit("c", ids(50, 101))
    replica.report(looked_up=((8, 0),))
    assert replica.core.store_kv.fault == ""
    assert len(replica.stores) == 5
    replica.now += 100
    replica.submit("d", ids(51, 101))
    replica.report(looked_up=((9, 0),), store_fault="again")
    due = replica.core.store_kv.next_due
    assert due is not None
    assert due - replica.now == pytest.approx(5)


def test_a_request_waits_only_for_so_long_and_one_that_leaves_begins_no_loads() -> None:
    replica = Replica()
    replica.submit("late")
    due = replica.core.next_due
    assert due is not None
    replica.now = due
    replica.handle(Tick())
    assert replica.admitted == {"late": 0}
    replica.report(looked_up=((0, 5),))
    assert replica.loads == []
    replica.submit("gone", ids(4, 101))
    replica.handle(Cancel("gone"))
    replica.report(looked_up=((1, 5),))
    assert replica.loads == []


def test_a_store_that_hangs_delays_no_further_request_until_it_is_tried_by_one_again() -> None:
    replica = Replica(writes_at_once=False)
    for number in range(3):  # they come together, so they wait together
        replica.submit(f"a{number}", ids(10 + number, 101))
    assert len(replica.lookups) == 3
    due = replica.core.next_due
    assert due is not None
    replica.now = due
    replica.handle(Tick())
    assert replica.admitted.keys() == {"a0", "a1", "a2"}
    assert replica.store.rests
    assert "it did not answer" in replica.core.store_kv.fault
    replica.submit("b", ids(20, 101))
    assert replica.admitted["b"] == 0, "it does not wait"
    replica.now += 6
    replica.handle(Tick())
    assert not replica.store.rests
    replica.submit("c", ids(21, 101))
    assert replica.admitted["c"] == 0, "earlier questions are still open"
    for number in range(3):
        replica.report(looked_up=((number, 0),), store_fault="it has timed out")
    due = replica.core.store_kv.next_due
    assert due == pytest.approx(replica.now + 10)
    replica.now += 10
    replica.submit("d", ids(22, 101))
    replica.submit("e", ids(23, 101))
    assert len(replica.lookups) == 4
    assert replica.admitted.keys() == {"a0", "a1", "a2", "b", "c", "e"}, "one tries"
    replica.report(looked_up=((3, 0),))
    assert replica.core.store_kv.fault == ""
    for number in range(2):
        replica.submit(f"f{number}", ids(30 + number, 101))
    assert len(replica.lookups) == 6, "all ask again"


def test_objects_wait_until_earlier_ones_are_written() -> None:
    replica = Replica(writes_at_once=False)
    for number in range(4):
        replica.submit(f"a{number}", ids(60 + number, 101))
        replica.report(looked_up=((number, 0),))
    most = HOST_BLOCKS // 4 // OBJECT_BLOCKS
    assert len(replica.stores) == most
    assert replica.core.pools.offered_blocks == (20 - most) * OBJECT_BLOCKS
    assert replica.core.idle, "it waits for its store, not the other way round"
    names = tuple(one.object.name for one in replica.stores)
    replica.report(not_stored=names[:1], stored=names[1:])
    assert replica.store.counts.failed_writes == 1
    assert replica.store.counts.written_blocks == (most - 1) * OBJECT_BLOCKS
    assert len(replica.stores) == 2 * most
    write_all(replica, most)
    counts = replica.store.counts
    assert (counts.written_blocks, counts.skipped_blocks) == (19 * OBJECT_BLOCKS, 0)
    assert {one.object.name for one in replica.stores} == {
        name for number in range(4) for name in written(ids(60 + number, 101))
    }


def test_what_all_ranks_found_in_the_store_does_not_count_as_written() -> None:
    replica = Replica(writes_at_once=False)
    replica.submit("a")
    replica.report(looked_up=((0, 0),))
    there, half, new = (one.object.name for one in replica.stores[:3])
    replica.report(stored=(there,), found_stored=(there,))
    replica.handle(DiskReport(0, stored=(half,)))
    replica.handle(DiskReport(1, stored=(half,), found_stored=(half,)))
    replica.report(stored=(new,))
    counts = replica.store.counts
    assert (counts.found_blocks, counts.written_blocks) == (OBJECT_BLOCKS, 2 * OBJECT_BLOCKS)
    block_bytes = 100
    assert copied_bytes(replica.core)["store", "written"] == 2 * OBJECT_BLOCKS * block_bytes


def write_all(replica: Replica, finished: int) -> None:
    """Let ranks finish one write after the other, behind the first ones that are `finished`, until nothing waits."""
    while finished < len(replica.stores):
        replica.report(stored=(replica.stores[finished].object.name,))
        replica.store.check()
        finished += 1
    assert replica.core.pools.offered_blocks == replica.store.busy_blocks == 0
    assert replica.core.idle


def test_prompts_are_written_whole_though_the_host_tier_is_full_of_what_is_worth_more() -> None:
    replica = Replica(host_blocks=60)
    prompts = [ids(60 + number, tokens) for number, tokens in enumerate((601, 101, 201, 101))]
    for number, prompt in enumerate(prompts):
        replica.submit(f"a{number}", prompt)
        replica.report(looked_up=((number, 0),))
    assert replica.store.counts.skipped_blocks == 0
    assert {one.object.name for one in replica.stores} == {
        name for prompt in prompts for name in written(prompt)
    }


def test_what_is_being_written_to_the_store_makes_no_room_for_what_passes_through_to_it() -> None:
    replica = Replica(host_blocks=2 * OBJECT_BLOCKS, writes_at_once=False)
    for number in range(2):
        replica.submit(f"a{number}", ids(60 + number, 101))
        replica.report(looked_up=((number, 0),))
    write_all(replica, 0)
    assert replica.store.counts.skipped_blocks == replica.store.counts.failed_writes == 0


class SmallPool(Replica):
    """A replica whose device holds one prompt, and whose host tier holds half of one."""

    def new_core(self) -> ReplicaController:
        return ReplicaController(replace(super().new_core().config, kv_blocks=30), self.profile)


def test_what_is_gone_before_the_store_comes_to_it_is_not_written() -> None:
    replica = SmallPool(writes_at_once=False, host_blocks=12)
    for number in range(3):
        replica.submit(f"a{number}", ids(80 + number, 101))
        replica.report(looked_up=((number, 0),))
        assert f"a{number}" in replica.admitted
    assert len(replica.stores) == 1
    assert 0 < replica.core.pools.offered_blocks <= 30
    write_all(replica, 0)
    assert len(replica.stores) < 15
    assert replica.store.counts.skipped_blocks == (15 - len(replica.stores)) * OBJECT_BLOCKS


def test_offers_wait_for_a_place_on_their_lane_and_no_more_than_the_pools_have_blocks_for() -> None:
    offers = Offers(10)
    assert offers.next(lambda _: True) is None
    assert offers.add(Offer(0, "a", 0, 4)) == 0
    assert offers.add(Offer(0, "a", 4, 6)) == 0
    assert (len(offers), offers.objects) == (1, 6), "they continue each other"
    assert offers.add(Offer(1, "b", 0, 3)) == 0
    assert offers.next(lambda _: False) is None
    found = offers.next(lambda lane: lane == 1)
    assert found is not None
    assert found.chain == "b"
    for _ in range(3):
        offers.take_first(found)
    assert offers.next(lambda lane: lane == 1) is None
    assert len(offers) == 1, "what was written is forgotten, though another one waits before it"
    assert offers.add(Offer(0, "c", 0, 7)) == 6, "the oldest one goes"
    assert offers.add(Offer(0, "d", 0, 12)) == 7, "but the newest one stays, however long it is"
    found = offers.next(lambda _: True)
    assert found is not None
    assert (found.chain, offers.objects) == ("d", 12)


def test_one_step_considers_a_bounded_number_of_objects_of_a_store_that_rests() -> None:
    replica = Replica()
    pools, counts = replica.core.pools, replica.store.counts
    replica.store.rests = True
    pools._offers = Offers(10**6)
    chain = "".join(f"{block:032x}" for block in range((MOST_CONSIDERED + 9) * OBJECT_BLOCKS))
    pools._offers.add(Offer(0, chain, 0, MOST_CONSIDERED + 5))
    pools._offers.add(Offer(0, chain[::-1], 0, 4))
    pools.write_through(10**6)
    assert (pools._offers.objects, counts.skipped_blocks) == (9, MOST_CONSIDERED * OBJECT_BLOCKS)
    pools.write_through(10**6)
    assert (pools._offers.objects, len(pools._offers), pools.has_offers) == (0, 0, False)


def test_a_long_prompt_that_is_cached_is_copied_for_the_store_with_several_steps() -> None:
    """The store has lost it, and copies take so long that an object is all that goes beside a step."""
    replica = Replica(copy_seconds=0.01, output_tokens=18)
    replica.store.rests = True
    replica.core.store_kv._rests_until = 1.0
    replica.submit("a")
    assert replica.stores == []
    replica.now = 2.0
    before = len(replica.steps)
    replica.submit("again")
    replica.report(looked_up=((0, 0),))
    assert [one.object.name for one in replica.stores] == written()
    copying = [step for step in replica.steps[before:] if step.stores]
    assert [len(step.stores) for step in copying] == [1] * 5
    for step in copying:
        assert step.entries
        assert step.predicted_seconds >= 0.01 * sum(load.count for load in step.loads)


def test_objects_that_an_output_fills_are_written_while_it_decodes() -> None:
    replica = Replica(output_tokens=3 * SIZE * OBJECT_BLOCKS)
    replica.submit("a")
    replica.report(looked_up=((0, 0),))
    text = replica.texts["a"]
    assert len(text) == len(PROMPT) + 3 * SIZE * OBJECT_BLOCKS
    assert [one.object.name for one in replica.stores] == written(text[:-1]), (
        "nobody computes the KV of the last token"
    )
    ends = [OBJECT_BLOCKS * SIZE * number for number in (6, 7)]
    at = replica.stored_at[5:7]
    assert all(end < length <= end + 2 * SIZE for end, length in zip(ends, at, strict=True)), "soon after"
    lookups = len(replica.lookups)
    replica.submit("goes on", text)
    names = [one.object.name for one in replica.stores]
    assert len(set(names)) == len(names), "nothing is written twice"
    assert (len(replica.lookups), "goes on" in replica.admitted) == (lookups, True), "it is on the device"
    replica.store.check()


def test_the_replica_that_takes_over_a_running_request_reads_its_output() -> None:
    """The first one is lost in the midst of its output; the router submits prompt and output to another one."""
    lost = Replica(output_tokens=400, lost_at_tokens=7 * SIZE * OBJECT_BLOCKS + 3 * SIZE)
    lost.submit("a")
    lost.report(looked_up=((0, 0),))
    there = {one.object.name for one in lost.stores}
    assert len(there) == 7
    successor = Replica()
    successor.submit("a", lost.texts["a"])
    (lookup,) = successor.lookups
    assert set(lookup.objects) == there
    successor.report(looked_up=((0, 7),))
    successor.report(loaded=tuple((extent, 0.01) for extent in range(7)))
    assert successor.admitted == {"a": 7 * OBJECT_BLOCKS * SIZE}


def test_a_short_prompt_is_written_with_its_output_once_both_are_long_enough() -> None:
    """Computing one object or two takes less time than reading them; more of them take longer."""
    replica = Replica(MIDDLE, output_tokens=4 * SIZE * OBJECT_BLOCKS, is_as_fast_as_predicted=True)
    replica.submit("a", ids(5, SIZE * OBJECT_BLOCKS + 1))
    assert (replica.lookups, replica.core.idle) == ([], True)
    text = replica.texts["a"]
    assert [one.object.name for one in replica.stores] == written(text[:-1])
    assert replica.stored_at[0] > 2 * SIZE * OBJECT_BLOCKS, "later than the first object was full"


@pytest.mark.parametrize("tokens", [SIZE * OBJECT_BLOCKS - 2, SIZE * OBJECT_BLOCKS + 7])
def test_fast_models_write_no_output(tokens: int) -> None:
    replica = Replica(profile=FAST, output_tokens=3 * SIZE * OBJECT_BLOCKS)
    replica.submit("a", ids(6, tokens))
    assert replica.core.idle
    assert replica.stores == []


def test_reports_that_nobody_asked_for_change_nothing() -> None:
    replica = Replica()
    replica.submit("a")
    before = digest([])
    for report in (
        DiskReport(7, looked_up=((0, 5),)),
        DiskReport(0, lane=3, looked_up=((0, 5),)),
        DiskReport(0, looked_up=((99, 5), (-1, 5))),
        DiskReport(0, loaded=((17, 0.1),), not_loaded=(18,), stored=("x",), not_stored=("y",)),
    ):
        replica.handle(report)
    assert replica.admitted == {}
    assert before == digest([])
    assert replica.store.counts.loaded_blocks == replica.store.counts.written_blocks == 0


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_order_of_answers_is_replayed_and_leaves_a_sound_state(data: st.DataObject) -> None:
    replica = Replica(host_blocks=data.draw(st.sampled_from([12, 30, 60])), writes_at_once=False)
    told_stores = told_lookups = told_loads = 0
    for number in range(data.draw(st.integers(4, 14))):
        replica.now += data.draw(st.sampled_from([0.0, 0.01, 0.4, 40.0]))
        match data.draw(st.sampled_from(["submit", "lookup", "load", "store", "tick"])):
            case "submit":
                shared = data.draw(st.integers(0, 100))
                prompt = np.concatenate([PROMPT[:shared], ids(data.draw(st.integers(0, 3)), 101 - shared)])
                replica.submit(f"r{number}", prompt)
            case "lookup" if told_lookups < len(replica.lookups):
                lookup = replica.lookups[told_lookups]
                told_lookups += 1
                there = data.draw(st.integers(-1, len(lookup.objects) + 1))
                fault = data.draw(st.sampled_from(["", "", "it hangs"]))
                replica.report(looked_up=((lookup.number, there),), store_fault=fault)
            case "load":
                tier = replica.core.pools.tiers[0]
                extents = [number for number in range(200) if tier.is_loading(number)]
                if extents:
                    told_loads += 1
                    extent = data.draw(st.sampled_from(extents))
                    if data.draw(st.booleans()):
                        replica.report(loaded=((extent, data.draw(st.sampled_from([0.001, 9.0]))),))
                    else:
                        replica.report(not_loaded=(extent,))
            case "store" if told_stores < len(replica.stores):
                name = replica.stores[told_stores].object.name
                told_stores += 1
                replica.report(**{data.draw(st.sampled_from(["stored", "not_stored"])): (name,)})
            case _:
                replica.handle(Tick())
        replica.store.check()
        replica.core.pools.tiers[0].check()
    again = replica.new_core()
    for event, now, commands in replica.log:
        assert digest(again.handle(event, now)) == commands
    for step in replica.steps:
        assert decode(encode(step))[0] == step


def test_objects_have_some_mebibytes_and_lie_at_equal_places_in_equal_prompts() -> None:
    assert [object_blocks(size) for size in (1, 2**19, 2**20, 2**23, 2**25)] == [32, 16, 8, 1, 1]
    tier = StoreTier([(0,)], OBJECT_BLOCKS, 100)
    long, short = HASHER.hashes(PROMPT), HASHER.hashes(PROMPT[:70])
    assert tier.objects(short) == tier.objects(long)[:3]
    assert tier.objects(long, 2) == tier.objects(long)[2:]
    assert len({one.name for one in tier.objects(long)}) == 5
    assert replace(tier.objects(long)[0], name="") != tier.objects(long)[1]
