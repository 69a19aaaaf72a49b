"""Layers that free KV before their windows have a pool for fewer sequences than may run: who runs, and that all do in the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.cost.predictor import StepProfile
from medha.kv.pools import WindowPool
from medha.kv.window_tables import LEAST_WINDOWS, WindowNeed, window_need
from medha.scheduler.controller import ReplicaController
from medha.scheduler.replica_config import ReplicaConfig
from medha.scheduler.window_places import WindowPlaces
from medha.topology import Topology
from medha.wire.messages import Cancel, ControllerEvent, Done, Emit, Sample, Sampling, Step, Submit

SIZE, WINDOW, RUNNING, LONGEST = 4, 32, 20, 400
NEED = window_need(
    WINDOW, block_size_tokens=SIZE, max_running=RUNNING, max_chunk_tokens=64, max_model_len=LONGEST
)
CONFIG = ReplicaConfig(
    topology=Topology(), scheduling=SchedulingSpec(max_chunk_tokens=64, min_chunk_tokens=4, max_running=RUNNING),
    service_classes={"default": ServiceClass(name="default", default_output_tokens=4)}, default_class="default",
    max_model_len=LONGEST, block_size_tokens=SIZE, kv_blocks=4000, long_threshold_tokens=LONGEST, prefix_caching=False,
    window_pool=WindowPool(NEED.of(3), WINDOW),
)  # fmt: skip


@dataclass
class Served:
    """A controller that serves requests to their end, and who ran at a time."""

    config: ReplicaConfig
    outputs: int = 60  # tokens
    ends: list[str] = field(default_factory=list)
    most_running: int = 0
    most_held: int = 0

    def run(self, tokens: Mapping[str, int], cancels: Mapping[int, str] | None = None) -> None:
        """Serve prompts of so many tokens, by name; after so many steps, cancel those that `cancels` names."""
        controller, now, running, steps = (
            ReplicaController(self.config, StepProfile(0.001, 0.0001, 1e-8, 0.0001)),
            0.0,
            set[str](),
            0,
        )
        events: list[ControllerEvent] = [
            Submit(name, name, count, count, 1, sampling=Sampling(max_tokens=self.outputs, ignore_eos=True))
            for name, count in tokens.items()
        ]
        while events:
            now += 0.01
            for command in controller.handle(events.pop(0), now):
                if isinstance(command, Emit) and command.finish_reason is not None:
                    self.ends.append(command.id)
                    running.discard(command.id)
                if isinstance(command, Step):
                    steps += 1
                    running |= {admit.id for admit in command.admits}
                    self.most_running = max(self.most_running, len(running))
                    windows = controller.pools.windows(0)
                    assert windows is not None
                    self.most_held = max(self.most_held, windows.held_blocks)
                    events.append(
                        Done(
                            command.step_id,
                            tuple(Sample(one.id, 7) for one in command.entries if one.samples),
                            (),
                            0.001,
                            command.lanes,
                        )
                    )
                    if cancels and steps in cancels:
                        running.discard(cancels[steps])
                        events.append(Cancel(cancels[steps]))
        assert controller.idle
        assert controller.pools.held_blocks == 0


def test_no_more_long_sequences_run_than_have_windows_and_all_end() -> None:
    served = Served(CONFIG)
    served.run({f"r{number}": 100 for number in range(12)})
    assert served.most_running == 3
    assert len(served.ends) == 12
    assert served.most_held <= NEED.of(3)


def test_short_sequences_count_as_long_as_they_may_become() -> None:
    served = Served(CONFIG, outputs=4)
    served.run({f"r{number}": 4 for number in range(18)})
    assert served.most_running == 11  # two blocks each, until less than a whole window of ten is left of 30
    assert len(served.ends) == 18


def test_a_pool_for_all_that_may_run_keeps_nobody_waiting() -> None:
    served = Served(replace(CONFIG, window_pool=WindowPool(NEED.of(RUNNING), WINDOW)))
    served.run({f"r{number}": 100 for number in range(RUNNING)})
    assert served.most_running == RUNNING


def test_a_long_request_is_not_passed_over_by_short_ones_because_of_its_window() -> None:
    served = Served(replace(CONFIG, scheduling=replace_policy("fcfs")))
    served.run({"a": 100, "b": 100, "c": 100, "long": 200} | {f"r{number}": 5 for number in range(9)})
    assert served.ends.index("long") < served.ends.index("r8")


def replace_policy(policy: str) -> SchedulingSpec:
    return CONFIG.scheduling.model_copy(update={"policy": policy})


def test_a_cancelled_sequence_leaves_its_window() -> None:
    served = Served(CONFIG)
    served.run({f"r{number}": 300 for number in range(6)}, {2: "r0", 4: "r1"})
    assert set(served.ends) >= {"r2", "r3", "r4", "r5"}


@pytest.mark.parametrize(("blocks", "places"), [(37, 3), (36, 2), (17, 1), (200, 20), (500, 50)])
def test_places_follow_from_the_pool(blocks: int, places: int) -> None:
    need = WindowNeed(sequence_blocks=10, step_blocks=7, longest_blocks=10)
    assert need.places(blocks) == max(places, blocks // 10)
    found = WindowPlaces(need, blocks)
    assert found.free == need.places(blocks)
    for number in range(found.free):
        found.take(f"s{number}", 99)
    assert found.free == 0
    found.give_back("s0")
    assert found.free == 1


def test_a_pool_of_fewer_windows_leaves_half_to_the_other_layers_and_has_the_fewest() -> None:
    need = WindowNeed(sequence_blocks=66, step_blocks=160, longest_blocks=8192)
    wished = need.of(256)
    assert need.pools(256, 40_000, in_all_layers=False) == [wished]
    assert need.pools(256, 3_000, in_all_layers=False) == [wished, 1_500 + 160]
    assert need.pools(256, 900, in_all_layers=False) == [wished, need.of(LEAST_WINDOWS)]
    assert need.pools(256, 3_000, in_all_layers=True) == [wished, 3_000]
    assert need.pools(256, 600, in_all_layers=True) == [wished]
    assert need.pools(2, 100, in_all_layers=False) == [need.of(2)]
