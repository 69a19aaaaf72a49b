"""A step message names ids and counts: what it weighs does not grow with the context (docs/design.md#ledgers-and-messages)."""

from __future__ import annotations

from collections import deque

import pytest

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.kv.context_parallel import ContextParallel, RingCosts
from medha.kv.prefix_cache import HASH_CHARACTERS
from medha.scheduler.controller import ReplicaController
from medha.scheduler.replica_config import ReplicaConfig
from medha.topology import Topology
from medha.wire.frames import encode
from medha.wire.messages import Done, Sample, Sampling, StageFree, Step, StepProfile, Submit

SHORT, LONG = (
    4_096,
    262_144,
)  # the short one takes enough steps for some of each kind to carry a hash of the state
BLOCK_TOKENS, OUTPUTS = 16, 40
COSTS = RingCosts(
    query_heads=8, kv_heads=2, element_bytes=2, attention_flops_per_second=1e12, link_bytes_per_second=1e9
)


def bytes_by_kind(context: int, lanes: int, strategy: str) -> dict[str, int]:
    """The largest message of each kind while five prompts of this length are served, one after the other.

    The third is the first one again, all of it cached; the others find the pool full of what nobody asks for any more.
    """
    config = ReplicaConfig(
        topology=Topology(kv=lanes),
        scheduling=SchedulingSpec(max_chunk_tokens=512, min_chunk_tokens=512),
        service_classes={"default": ServiceClass(name="default")},
        default_class="default",
        max_model_len=2 * LONG,
        block_size_tokens=BLOCK_TOKENS,
        kv_blocks=(2 * context + 64 * BLOCK_TOKENS) // lanes // BLOCK_TOKENS + 64,
        long_threshold_tokens=1 if lanes > 1 else 2 * LONG,
        tokens_per_lane=context // lanes,
        prefix_caching=True,
        context_parallel=ContextParallel(strategy, COSTS) if strategy else None,
    )
    core = ReplicaController(config, StepProfile(1e-3, 1e-6, 1e-12, 1e-5))
    found: dict[str, int] = {}
    for number, content in enumerate((0, 1, 0, 2, 3)):
        id_ = f"request-{number}"
        hashes = "".join(
            f"{content:x}{block:0{HASH_CHARACTERS - 1}x}" for block in range(context // BLOCK_TOKENS)
        )
        submit = Submit(
            id=id_, prompt=f"prompt-{number}", tokens=context, prompt_length=context, seed=1, block_hashes=hashes,
            sampling=Sampling(max_tokens=OUTPUTS, ignore_eos=True),
        )  # fmt: skip
        running: deque[Step] = deque()

        def take(event: Submit | StageFree | Done, running: deque[Step] = running) -> None:
            running.extend(command for command in core.handle(event, 0.0) if isinstance(command, Step))

        take(submit)
        while running:
            step = running.popleft()
            kind = "decode" if all(entry.token_count == 1 for entry in step.entries) else "prefill"
            if step.admits:
                kind = "admits a cached one" if step.admits[0].cached_tokens else "admits"
            found[kind] = max(found.get(kind, 0), len(encode(step)[0]))
            take(StageFree(step.step_id, 0))
            take(Done(step.step_id, tuple(Sample(entry.id, 7) for entry in step.entries if entry.samples)))
    assert core.idle
    return found


@pytest.mark.parametrize(
    ("lanes", "strategy"), [(1, ""), (2, ""), (4, ""), (2, "passKv"), (4, "passQ"), (4, "striped")]
)
def test_a_step_weighs_as_much_at_256k_as_at_4k(lanes: int, strategy: str) -> None:
    short, long = (bytes_by_kind(context, lanes, strategy) for context in (SHORT, LONG))
    assert set(short) == set(long) == {"admits", "admits a cached one", "prefill", "decode"}
    for kind, size in long.items():
        assert size < 1000, kind
        assert size <= short[kind] + 128, f"{kind}: more digits, and no more numbers"
