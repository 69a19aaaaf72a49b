"""Baselines: small schedules computed by hand, on an executor whose steps take round times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from medha.cost.cost_profile import Attention, Operation, Profile
from medha.cost.hardware import A100, H100, LLAMA3_8B, LLAMA3_70B, LLAMA31_405B, profile_for
from medha.cost.predictor import Predictor
from medha.errors import ConfigInvalid
from medha.topology import Topology
from medha.wire.messages import Cancel, Done, Emit, Failed, Refused, Sample, Sampling, Step, Submit
from medha_sim.baselines.baseline_costs import DisaggregatedCost, ElasticCost, RingLink
from medha_sim.baselines.distserve import DistServe, longest_prompt_tokens
from medha_sim.baselines.hrrn import Hrrn
from medha_sim.baselines.loongserve import LoongServe, LoongServeSettings
from medha_sim.baselines.sarathi import Sarathi
from medha_sim.baselines.single_prefill import SinglePrefill
from medha_sim.baselines.systems import LOONGSERVE_ITERATION_SECONDS, SYSTEMS, simulation
from medha_sim.executor import Executor, StepCost, StepTiming
from medha_sim.lengths import SHAREGPT
from medha_sim.run_log import RunLog
from medha_sim.run_summary import summarise
from medha_sim.scenario import Deployment, card
from medha_sim.simulation import Arrival, Controller, SimulatedReplica, Simulation, Workload

ROOMY = 1_000_000


def one_second(step: Step, _now: float) -> StepTiming:
    """Every step keeps its only stage busy for a second."""
    return StepTiming((1.0,))


def per_token(step: Step, _now: float) -> StepTiming:
    """A second a token."""
    return StepTiming((float(sum(entry.token_count for entry in step.entries)),))


def arrival(name: str, at: float, prompt: int, output: int = 1, ttft: float = 10.0) -> Arrival:
    return Arrival(name, at, prompt, output, ttft, 100.0, max_tokens=output)


def run(
    controller: Controller,
    cost: StepCost,
    arrivals: Sequence[Arrival],
    *,
    stages: int = 1,
    lanes: int = 1,
    until: float = 10_000.0,
) -> RunLog:
    workload = Workload(arrivals)
    executor = Executor(cost, stages=stages, lanes=lanes, ends_at=workload.ends_at())
    replica = SimulatedReplica(controller, executor, card("r", Deployment().config()))
    return Simulation([replica], workload, sample_seconds=1000.0).run(until)


def first_tokens(log: RunLog) -> dict[str, float | None]:
    return {name: record.first_token_at for name, record in log.requests.items()}


# --- Sarathi and vLLM ----------------------------------------------------------------------------------


def test_sarathi_serves_in_the_order_of_arrival_and_fills_a_step_with_the_next_prompt() -> None:
    # chunk 4: A takes 4, then its last 2 beside 2 of B, then B's last 2.
    log = run(Sarathi(ROOMY, chunk_tokens=4), one_second, [arrival("A", 0, 6), arrival("B", 0, 4)])
    assert first_tokens(log) == {"A": 2.0, "B": 3.0}


def test_a_decode_takes_its_token_from_the_chunk() -> None:
    # A decodes from 1 s on, so B's 4 tokens need two steps of 3 + 1.
    log = run(Sarathi(ROOMY, chunk_tokens=4), one_second, [arrival("A", 0, 4, 5), arrival("B", 0.5, 4)])
    assert first_tokens(log) == {"A": 1.0, "B": 3.0}


def test_without_stream_pipelining_a_partial_prefill_waits_for_the_last_stage() -> None:
    def two_stages(step: Step, _now: float) -> StepTiming:
        return StepTiming((1.0, 1.0))

    one = [arrival("A", 0, 8)]
    assert first_tokens(run(Sarathi(ROOMY, chunk_tokens=4, stages=2), two_stages, one, stages=2)) == {
        "A": 4.0
    }
    profile = Profile("p", "test", layers=2, linear=(Operation("l", compute_seconds_per_row=0.25),))
    streamed = SinglePrefill(
        ROOMY, Predictor(profile, Topology(stream=2)), "fcfs", max_chunk_tokens=4, max_step_seconds=2.0
    )
    assert first_tokens(run(streamed, two_stages, one, stages=2)) == {"A": 3.0}


def test_the_long_prefill_threshold_lets_a_short_prompt_share_the_step() -> None:
    arrivals = [arrival("long", 0, 8), arrival("short", 0, 2)]
    plain = run(Sarathi(ROOMY, chunk_tokens=4), one_second, arrivals)
    capped = run(Sarathi(ROOMY, chunk_tokens=4, long_prefill_threshold_tokens=2), one_second, arrivals)
    assert first_tokens(plain) == {"long": 2.0, "short": 3.0}
    assert first_tokens(capped) == {"long": 4.0, "short": 2.0}  # it came behind the first step's launch


def test_a_request_without_room_holds_back_all_behind_it() -> None:
    # A and B reserve 9 of 12 tokens each, C would fit beside A.
    arrivals = [arrival("A", 0, 8), arrival("B", 0, 8), arrival("C", 0, 1)]
    log = run(Sarathi(12, chunk_tokens=8), one_second, arrivals)
    assert first_tokens(log) == {"A": 1.0, "B": 2.0, "C": 2.0 + 1.0}


def test_a_request_that_could_never_fit_is_refused() -> None:
    assert isinstance(Sarathi(12).handle(submit("A", 20), 0.0)[0], Refused)


def test_a_cancelled_request_gives_back_its_kv_once_its_step_is_done() -> None:
    sarathi = Sarathi(12, chunk_tokens=8)
    (step,) = sarathi.handle(submit("A", 8), 0.0)
    assert isinstance(step, Step)
    free = sarathi.load().kv_tokens_free
    assert sarathi.handle(Cancel("A"), 0.5) == []
    assert sarathi.load().kv_tokens_free == free == 3
    assert sarathi.handle(Done(step.step_id, (Sample("A", 7),)), 1.0) == []
    assert sarathi.load().kv_tokens_free == 12


def submit(name: str, tokens: int) -> Submit:
    return Submit(name, name, tokens, tokens, 0, deadline_after_seconds=10.0, sampling=Sampling(max_tokens=1))


# --- SGLang-like -----------------------------------------------------------------------------------------


def test_the_highest_response_ratio_goes_first() -> None:
    # While A runs (0 to 8 s), B waits 7 s for 7 s of work (ratio 2), C waits 2 s for 1 s of work (ratio 3).
    controller = Hrrn(ROOMY, float, chunk_tokens=8)
    log = run(controller, per_token, [arrival("A", 0, 8), arrival("B", 1, 7), arrival("C", 6, 1)])
    assert first_tokens(log) == {"A": 8.0, "B": 16.0, "C": 16.0}  # both fit one step of 8
    alone = Hrrn(ROOMY, float, chunk_tokens=7)
    log = run(alone, per_token, [arrival("A", 0, 7), arrival("B", 1, 7), arrival("C", 5, 1)])
    assert first_tokens(log)["C"] == 7.0 + 7.0  # C (ratio 3) leads, B's first 6 tokens fill the step
    assert first_tokens(log)["B"] == 7.0 + 7.0 + 1.0


def test_prefills_stall_decodes_until_none_is_left() -> None:
    arrivals = [arrival("A", 0, 4, 3), arrival("B", 0.5, 8)]
    log = run(Hrrn(ROOMY, float, chunk_tokens=4), one_second, arrivals)
    assert first_tokens(log) == {"A": 1.0, "B": 3.0}
    assert log.requests["A"].worst_gap_seconds == 3.0  # two chunks of B between its first and second token


# --- Medha without multi-prefill batching ----------------------------------------------------------------


@pytest.mark.parametrize(("policy", "first"), [("fcfs", "long"), ("edf", "short"), ("lrs", "short")])
def test_one_prefill_a_step_in_the_order_of_the_policy(policy: str, first: str) -> None:
    profile = Profile("p", "test", layers=1, linear=(Operation("l", compute_seconds_per_row=1.0),))
    controller = SinglePrefill(
        ROOMY, Predictor(profile, Topology()), policy, max_chunk_tokens=1, max_step_seconds=1.0
    )
    steps: list[set[str]] = []

    def noted(step: Step, _now: float) -> StepTiming:
        steps.append({entry.id for entry in step.entries})
        return per_token(step, _now)

    arrivals = [arrival("long", 0, 10, ttft=30), arrival("short", 0.5, 2, ttft=4)]
    log = run(controller, noted, arrivals)
    assert all(len(step) == 1 for step in steps)
    expected = {"long": 10.0, "short": 12.0} if first == "long" else {"long": 12.0, "short": 3.0}
    assert first_tokens(log) == expected


def test_a_chunk_fills_what_the_tpot_target_leaves_beside_the_decodes() -> None:
    # A decode takes 1 s, the target is 4 s: chunks of 3 beside it.
    profile = Profile("p", "test", layers=1, linear=(Operation("l", compute_seconds_per_row=1.0),))
    controller = SinglePrefill(
        ROOMY, Predictor(profile, Topology()), "fcfs", max_step_seconds=8.0, min_chunk_tokens=1
    )
    counts: list[int] = []

    def noted(step: Step, _now: float) -> StepTiming:
        counts.append(sum(entry.token_count for entry in step.entries))
        return per_token(step, _now)

    decoding = replace(arrival("A", 0, 2, 10), tpot_target_seconds=4.0)
    run(controller, noted, [decoding, arrival("B", 0.5, 6)])
    assert counts[:4] == [2, 4, 4, 1]


# --- LoongServe --------------------------------------------------------------------------------------------


class LinearCost(ElasticCost):
    """A prefill takes tokens / instances seconds, a decode step one second."""

    def __init__(self) -> None:
        pass

    def __call__(self, step: Step, now: float) -> StepTiming:
        tokens = sum(entry.token_count for entry in step.entries)
        if step.entries[0].extents[0].start:
            return StepTiming((1.0,))
        return StepTiming((tokens / len(step.lanes),))

    def prefill_seconds(
        self, tokens: int, pairs: float, prompts: int, degree: int, *, one_node: bool = True
    ) -> float:
        return tokens / degree


def loongserve(**settings: int) -> LoongServe:
    return LoongServe(LoongServeSettings(**{"instances": 4, **settings}), LinearCost())


def test_a_lone_prompt_gets_every_instance() -> None:
    log = run(loongserve(), LinearCost(), [arrival("A", 0, 100)], lanes=4)
    assert first_tokens(log) == {"A": 25.0}


def test_a_short_prompt_waits_for_the_end_of_the_macro_iteration() -> None:
    arrivals = [arrival("long", 0, 100), arrival("short", 1, 4)]
    log = run(loongserve(), LinearCost(), arrivals, lanes=4)
    assert first_tokens(log) == {"long": 25.0, "short": 26.0}


def test_a_reserved_pool_serves_shorts_at_once_and_longs_with_fewer_instances() -> None:
    arrivals = [arrival("long", 0, 100), arrival("short", 1, 4)]
    log = run(loongserve(reserved_instances=2, reserved_below_tokens=50), LinearCost(), arrivals, lanes=4)
    assert first_tokens(log) == {"long": 50.0, "short": 3.0}


def test_an_idle_instance_takes_only_what_ends_inside_the_macro_iteration() -> None:
    # At 0 the program gives two instances to each prompt (99 / 2 / 99 + 2 / 2 / 2 is least), so the macro-iteration
    # ends at 49.5 s. From 1 s on two instances are idle. On one each, 20 tokens take until 21 s, but 60 until 61 s;
    # and at 21 s two of them would take until 51 s. So those wait, and get all four instances.
    arrivals = [
        arrival("long", 0, 99),
        arrival("short", 0, 2),
        arrival("late", 0.5, 60),
        arrival("fits", 0.6, 20),
    ]
    times = first_tokens(run_together(loongserve(), arrivals))
    assert times == {"first": 0.0, "long": 49.5, "short": 1.0, "fits": 21.0, "late": 49.5 + 15.0}


def run_together(controller: LoongServe, arrivals: list[Arrival]) -> RunLog:
    """The first two arrive while a tiny prompt runs, so that one dynamic program sees both."""
    first = arrival("first", 0, 1)
    shifted = [replace(each, at_seconds=each.at_seconds + 0.1) for each in arrivals]
    log = run(controller, LinearCost(), [first, *shifted], lanes=4)
    for record in log.requests.values():
        if record.first_token_at is not None:
            record.first_token_at -= 0.25
    return log


def test_decodes_stay_on_one_instance_and_the_others_prefill() -> None:
    arrivals = [arrival("A", 0, 40, 100), arrival("B", 20, 30)]
    log = run(loongserve(), LinearCost(), arrivals, lanes=4)
    assert first_tokens(log) == {"A": 10.0, "B": 20.0 + 30 / 3}
    assert log.requests["A"].worst_gap_seconds == 1.0


def test_decodes_of_several_instances_move_together_before_the_next_macro_iteration() -> None:
    # A and B are prefilled in one macro-iteration on two instances each, and each decodes on one of its own. At 8.5 s
    # both decode; C still gets three instances, behind the decode step that one of them runs until 9 s.
    arrivals = [
        arrival("first", 0, 4),
        arrival("A", 0.1, 4, 50),
        arrival("B", 0.1, 4, 50),
        arrival("C", 8.5, 30),
    ]
    log = run(loongserve(), LinearCost(), arrivals, lanes=4)
    assert first_tokens(log) == {"first": 1.0, "A": 3.0, "B": 3.0, "C": 9.0 + 10.0}


def test_no_more_requests_than_the_limit_hold_kv() -> None:
    arrivals = [arrival("A", 0, 4, 10), arrival("B", 0, 4)]
    log = run(loongserve(max_running=1), LinearCost(), arrivals, lanes=4)
    assert first_tokens(log) == {"A": 1.0, "B": 10.0 + 1.0}  # nine decode steps of A, then B


def test_more_instances_divide_attention_and_linear_work_but_not_the_exchange() -> None:
    profile = Profile(
        "p",
        "test",
        layers=2,
        linear=(Operation("l", compute_seconds_per_row=1e-6),),
        attention=Attention(seconds_per_pair=1e-8),
    )
    fast = ElasticCost(profile, RingLink(1.0, 1e12, 1e3, latency_seconds=0.0))
    one, four = (fast.prefill_seconds(8000, 3.2e7, 1, degree) for degree in (1, 4))
    assert one == pytest.approx(2 * (8000e-6 + 0.32))
    assert four == pytest.approx(one / 4)
    # Over nodes a part of 2,000 tokens takes 2 s a round; attention hides 0.02 s of it in each of three rounds.
    assert fast.prefill_seconds(8000, 3.2e7, 1, 4, one_node=False) == pytest.approx(
        one / 4 + 2 * 3 * (2.0 - 0.02)
    )
    assert ElasticCost(profile, RingLink(1.0, 1e12, 1e3), speed=2.0).prefill_seconds(
        8000, 3.2e7, 1, 1
    ) == pytest.approx(one / 2)


def test_beyond_its_table_the_linear_cost_goes_on_at_the_same_rate() -> None:
    profile = profile_for(LLAMA3_8B, A100, Topology(tensor=2))
    cost = ElasticCost(profile, RingLink(1024.0, 1e11, 1e10))
    tokens = np.array([65_536])
    exact = float((profile.linear_seconds(tokens) + profile.all_reduce.seconds(tokens))[0])
    in_layers = cost.prefill_seconds(65_536, 0.0, 0, 1) - cost.prefill_seconds(0, 0.0, 0, 1)
    assert in_layers / profile.layers == pytest.approx(exact, rel=0.01)


# --- DistServe -----------------------------------------------------------------------------------------------


def disaggregated(step: Step, _now: float) -> StepTiming:
    return StepTiming((2.0 if step.entries[0].strategy == "transfer" else 1.0,))


def test_kv_travels_before_the_second_token() -> None:
    log = run(DistServe(ROOMY, longest_prompt=1000), disaggregated, [arrival("A", 0, 10, 3)], lanes=3)
    record = log.requests["A"]
    assert record.first_token_at == 1.0
    assert record.worst_gap_seconds == 3.0  # 2 s on the link, 1 s of decode
    assert record.ended_at == 5.0


def test_prefills_do_not_disturb_decodes() -> None:
    arrivals = [arrival("A", 0, 10, 8), arrival("B", 4.5, 10)]
    log = run(DistServe(ROOMY, longest_prompt=1000), disaggregated, arrivals, lanes=3)
    assert first_tokens(log)["B"] == 5.5
    assert log.requests["A"].ended_at == 1.0 + 2.0 + 7 * 1.0


def test_a_prompt_whose_activations_do_not_fit_fails_as_out_of_memory() -> None:
    log = run(DistServe(ROOMY, longest_prompt=1000), disaggregated, [arrival("A", 0, 1001)], lanes=3)
    assert log.requests["A"].ending == "failed"
    assert log.requests["A"].detail.startswith("out_of_memory")
    (failed,) = DistServe(ROOMY, longest_prompt=1000).handle(submit("B", 2000), 0.0)
    assert isinstance(failed, Failed)


def test_the_longest_prompt_is_bound_by_activations_that_tensor_parallelism_does_not_split() -> None:
    one, eight = (longest_prompt_tokens(LLAMA3_8B, H100, tensor) for tensor in (1, 8))
    assert 100_000 < one < eight < 2_000_000
    # By hand at TP1: (72e9 - 16.06e9) / (2 x (5 x 4096 + 48 x 128 + 2 x 14336) + 131072) bytes.
    assert one == pytest.approx((72e9 - 16.06e9) / (2 * 55_296 + 131_072), rel=1e-3)


def test_distserve_fails_behind_a_bound_above_the_papers_longest_prompts() -> None:
    """Paper B §6.1 says that it runs out of memory, and not from where; here 8B on two pools of TP8 does so at 1.06M."""
    for deployment, bound in (
        (Deployment(max_model_len=2_000_000), 1_059_721),
        (Deployment(model=LLAMA3_70B, max_model_len=2_000_000), 388_921),
    ):
        assert longest_prompt_tokens(deployment.model, A100, 8) == bound
        prompts = [
            arrival("longest", 0, bound, 2),
            arrival("one more", 0, bound + 1, 2),
            arrival("short", 1, 100),
        ]
        log = simulation("distserve", deployment, Workload(prompts)).run(36_000.0)
        assert {name: record.ending for name, record in log.requests.items()} == {
            "longest": "finished",
            "one more": "failed",
            "short": "finished",
        }
        (why,) = summarise(log)["unserved"]
        assert (why["ending"], why["reason"], why["count"]) == ("failed", "out_of_memory", 1)
        assert why["first"] == f"activations of {bound + 1} tokens; at most {bound} fit"


def test_the_transfer_takes_bytes_over_bandwidth() -> None:
    profile = Profile("p", "test", layers=1)
    cost = DisaggregatedCost(Predictor(profile), 1000.0, 1e6)
    distserve = DistServe(ROOMY, longest_prompt=1000)
    (prefill,) = distserve.handle(replace(submit("A", 500), sampling=Sampling(max_tokens=2)), 0.0)
    assert isinstance(prefill, Step)
    emit, transfer = distserve.handle(Done(prefill.step_id, (Sample("A", 500),)), 1.0)
    assert isinstance(emit, Emit)
    assert isinstance(transfer, Step)
    assert cost(transfer, 0.0).stage_seconds == (0.5,)


# --- all of them -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload(
        [
            arrival("a", 0.0, 50_000, 20, ttft=30.0),
            *(arrival(f"s{index}", 0.1 * index, 300 + index, 10, ttft=2.0) for index in range(8)),
        ]
    )


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_ends_every_request_with_all_its_tokens_and_holds_no_kv(
    system: str, workload: Workload
) -> None:
    chosen = simulation(system, Deployment(), workload)
    log = chosen.run(600.0)
    assert {record.ending for record in log.requests.values()} == {"finished"}
    assert all(record.tokens == record.output_tokens for record in log.requests.values())
    assert log.series.kv_share[-1] == 0


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_same_workload_gives_the_same_log(system: str, workload: Workload) -> None:
    times: list[Callable[[], dict[str, float | None]]] = [
        lambda: first_tokens(simulation(system, Deployment(), workload).run(600.0)) for _ in range(2)
    ]
    assert times[0]() == times[1]()


@pytest.mark.parametrize(
    ("system", "grid", "words"),
    [
        (
            "sarathi-512",
            Topology(8, 1, 2),
            r"one lane, 8 GPUs, but TP8 x SPP1 x KVP2 has 16, .* e\.g\. 8x2x1",
        ),
        ("vllm-2048", Topology(8, 2, 2), r"one lane, 16 GPUs, but .* has 32, .* e\.g\. 8x4x1"),
        ("hrrn", Topology(1, 1, 2), r"one lane, 1 GPUs, but .* has 2"),
        ("single-lars", Topology(8, 1, 2), "one lane, 8 GPUs"),
        ("distserve", Topology(8), r"pool of TP8, 16 GPUs, but TP8 x SPP1 x KVP1 has 8, .* e\.g\. 8x2x1"),
        ("distserve", Topology(8, 4, 2), "pool of TP8, 16 GPUs, but TP8 x SPP4 x KVP2 has 64"),
        (
            "loongserve",
            Topology(),
            "1 or more instances of TP2, but .* has 1, .* an even number of GPUs, 2 or",
        ),
        ("loongserve", Topology(3), "instances of TP2, but TP3 x SPP1 x KVP1 has 3"),
        ("loongserve-reserved", Topology(6), "4 or more instances of TP2, but .* has 6, .* 8 or more"),
    ],
)
def test_a_grid_of_which_a_system_uses_other_than_all_gpus_is_refused(
    system: str, grid: Topology, words: str
) -> None:
    with pytest.raises(ConfigInvalid, match=f"{system} runs on .*{words}.* leave {system} out"):
        simulation(system, Deployment(topology=grid), Workload([]))


@pytest.mark.parametrize(
    ("system", "grid", "used"),
    [
        ("sarathi-512", Topology(4, 4), 16),
        ("distserve", Topology(8, 1, 2), 16),
        ("loongserve", Topology(2), 2),
        ("loongserve", Topology(8, 2, 2), 32),
        ("loongserve-reserved", Topology(4, 2), 8),
    ],
)
def test_other_grids_are_simulated_on_all_of_their_gpus(system: str, grid: Topology, used: int) -> None:
    assert grid.ranks == used
    log = simulation(system, Deployment(topology=grid), Workload([arrival("a", 0, 100, 3)])).run(60.0)
    assert log.requests["a"].ending == "finished"


@pytest.mark.parametrize(("system", "gpus"), [("loongserve", 2), ("distserve", 8)])
def test_weights_that_do_not_fit_a_part_of_a_system_are_refused_with_what_to_change(
    system: str, gpus: int
) -> None:
    deployment = Deployment(model=LLAMA31_405B, hardware=H100, topology=Topology(8, 2))
    words = f"parts of {gpus} GPUs, and the weights of Llama-3.1-405B do not fit {gpus} H100; simulate hardware with"
    with pytest.raises(ConfigInvalid, match=words):
        simulation(system, deployment, Workload([]))


def test_an_unknown_system_is_refused_by_name(workload: Workload) -> None:
    with pytest.raises(ConfigInvalid, match="choose one of medha-fcfs"):
        simulation("orca", Deployment(), workload)


def test_loongserve_is_calibrated_to_leave_at_most_1_75_short_requests_a_second() -> None:
    """T4: 128 decoding requests leave at 128 / (TPOT x mean output)."""
    prompts, outputs = SHAREGPT.sample(20_000, np.random.default_rng(0))
    profile = profile_for(LLAMA3_8B, A100, Topology(tensor=2))
    cost = ElasticCost(
        profile, RingLink(2048.0, 3e11, 2.5e10), iteration_seconds=LOONGSERVE_ITERATION_SECONDS
    )
    context = float(np.mean(prompts + outputs / 2))
    tpot_seconds = cost.decode_seconds(int(128 * context), 128, 1)
    assert 128 / (tpot_seconds * float(np.mean(outputs))) == pytest.approx(1.75, rel=0.05)
