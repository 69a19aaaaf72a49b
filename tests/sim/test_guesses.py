"""Simulated replicas guess tokens with the controller's own code, at the cost and gain that real ranks would have."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medha.api.replica import MedhaReplicaSpec, SchedulingSpec
from medha.cost.hardware import DEEPSEEK_V3, H100, LLAMA3_8B, LLAMA3_70B, ModelShape, profile_for
from medha.cost.predictor import Predictor, Work
from medha.errors import ConfigInvalid
from medha.scheduler.speculation import DraftChance
from medha.topology import Topology
from medha.wire.messages import Admit, Done, Extent, Sample, Sampling, Step, StepEntry
from medha_sim.draft_times import DraftShape, DraftTimes, Run, alone, with_head
from medha_sim.executor import Executor, PredictorCost, StepTiming
from medha_sim.guesses import ACCEPTANCE, WRONG, LookupGuesser, ProposingGuesser, Texts
from medha_sim.head_shape import HeadShape, mtp_shape
from medha_sim.run_log import RunLog
from medha_sim.run_summary import is_good, summarise
from medha_sim.scenario import Deployment, deployment_of
from medha_sim.simulation import Arrival, Workload
from medha_sim.study import RunKey, StudyResult, StudySpec, WorkloadSpec, simulate_one
from medha_sim.study_report import of_study, page, table_rows

LLAMA32_1B = ModelShape("Llama-3.2-1B", 16, 2048, 32, 8, 64, 8192, 128256, tied_embeddings=True)
"""https://huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json"""
SPECULATIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "promptLookup": {"method": "promptLookup"},
    "draftModel": {"method": "draftModel", "draftModel": {"path": "draft"}},
    "predictionHead": {"method": "predictionHead", "predictionHead": {"kind": "mtp"}},
}
HEAD = HeadShape("a head", 10**9, 4096, replace(LLAMA3_8B, layers=1))
DRAFTS: dict[str, DraftShape] = {"draftModel": LLAMA32_1B, "predictionHead": HEAD}


def deployment(method: str = "promptLookup", acceptance: float = ACCEPTANCE, **more: Any) -> Deployment:
    scheduling = SchedulingSpec.model_validate(
        {"maxChunkTokens": 8192, "speculation": SPECULATIONS[method] | {"maxDraftTokens": 4}}
    )
    usual: dict[str, Any] = {"hardware": H100, "topology": Topology(tensor=4), "draft": DRAFTS.get(method)}
    return Deployment(scheduling=scheduling, acceptance=acceptance, **(usual | more))


def streams(
    count: int,
    *,
    gap_seconds: float = 0.0,
    prompt_tokens: int = 500,
    output_tokens: int = 100,
    tpot_seconds: float = 0.02,
) -> Workload:
    """Requests at equal intervals, with a TTFT target of 1 s."""
    first = Arrival("r0", 0.0, prompt_tokens, output_tokens, 1.0, tpot_seconds, max_tokens=output_tokens)
    return Workload(
        [replace(first, id=f"r{index}", at_seconds=gap_seconds * index) for index in range(count)]
    )


def run(of: Deployment, workload: Workload, seed: int = 1) -> RunLog:
    return of.simulation(workload, seed=seed).run(10_000)


def tokens_per_decode(log: RunLog) -> float:
    found: float = summarise(log)["guesses"]["tokens_per_decode"]
    return found


# --- which guesses are right ---------------------------------------------------------------------------


def test_as_many_guesses_are_right_as_the_acceptance_says() -> None:
    texts = Texts(0.3, 1, {})
    assert np.mean([texts.is_right("a", position) for position in range(20_000)]) == pytest.approx(
        0.3, abs=0.01
    )
    assert not any(Texts(0.0, 1, {}).is_right("a", position) for position in range(1000))
    assert all(Texts(1.0, 1, {}).is_right("a", position) for position in range(1000))


def test_a_text_depends_on_the_seed_and_the_sequence_and_is_the_same_after_a_retry() -> None:
    def text(id_: str, seed: int, acceptance: float = 0.5) -> list[bool]:
        return [Texts(acceptance, seed, {}).is_right(id_, position) for position in range(200)]

    assert text("a", 1) == text("a", 1) == text("a~2", 1)
    assert text("a", 1) != text("a", 2)
    assert text("a", 1) != text("b", 1)
    assert all(later >= now for now, later in zip(text("a", 1), text("a", 1, 0.8), strict=True))


def test_the_default_is_what_controllers_assume_before_they_have_judged_a_guess() -> None:
    assert DraftChance().chance == ACCEPTANCE


# --- what ranks report -----------------------------------------------------------------------------------


def verifying(id_: str, start: int, drafts: tuple[int, ...], proposes: int = 0, follows: int = 0) -> Step:
    extents = (Extent(start, 1 + len(drafts)),)
    return Step(0, 0, (StepEntry(id_, 0, extents, True, drafts=drafts, proposes=proposes, follows=follows),))


@pytest.mark.parametrize(
    ("drafts", "tokens"),
    [
        ((), [11]),
        ((WRONG, 12), [11]),
        ((11, WRONG, 13), [11, 12]),
        ((11, 12, 13), [11, 12, 13, 14]),
        ((11, 12, 13, 14, 15), [11, 12, 13, 14]),  # 14 is the stop token
    ],
)
def test_a_step_samples_one_token_more_for_each_right_guess(
    drafts: tuple[int, ...], tokens: list[int]
) -> None:
    """As ranks do: until the first wrong one, or the stop token."""
    executor = Executor(
        lambda _step, _now: StepTiming((1.0,)),
        stages=1,
        lanes=1,
        ends_at={"a": 15},
        guesser=LookupGuesser(Texts(1.0, 0, {"a": 15}), 3),
    )
    launched = executor.launch(verifying("a", 10, drafts), 0.0)
    done = launched.events[1][1]
    assert isinstance(done, Done)
    assert [sample.token for sample in done.samples] == tokens
    ends = tokens[-1] == 14
    assert [sample.finish_reason for sample in done.samples] == [None] * (len(tokens) - 1) + [
        "stop" if ends else None
    ]
    assert done.drafts == (() if ends else (("a", tuple(range(tokens[-1] + 1, tokens[-1] + 4))),))
    assert launched.right_guesses == len(tokens) - 1


class _Counted(DraftTimes):
    """Notes what is computed; each token takes a second."""

    def __init__(self) -> None:
        super().__init__(LLAMA32_1B, H100)
        self.runs: list[Run] = []

    def seconds(self, runs: Any, places: Any) -> float:
        self.runs += runs
        return float(sum(one.count for one in runs) + sum(count - 1 for _, count in places))


def test_a_draft_model_computes_what_it_has_not_computed_and_keeps_the_kv_of_right_guesses() -> None:
    times = _Counted()
    guesser = ProposingGuesser(Texts(1.0, 0, {"a": 100}), times)

    def reports(step: Step, *tokens: int) -> tuple[tuple[int, ...], float]:
        drafts, seconds = guesser(step, [Sample("a", token) for token in tokens])
        return dict(drafts).get("a", ()), seconds

    # The prompt has 10 tokens. Six of them are followed, then the other five with the sampled one.
    assert reports(verifying("a", 10, (), follows=6), 11) == ((), 6)
    assert reports(verifying("a", 11, (), proposes=3, follows=5), 12) == ((13, 14, 15), 7 + 2)
    # Three guesses were right; the KV of two of them is there already. So are those of 13 and 14.
    assert reports(verifying("a", 12, (13, 14, 15), proposes=3), 13, 14, 15, 16) == ((17, 18, 19), 2 + 2)
    # Nothing is proposed for a sequence that ends, and hardly any time passes.
    assert reports(verifying("a", 16, (17,)), 17) == ((), 0.0)
    drafts, seconds = guesser(verifying("a", 18, (), proposes=3), [Sample("a", 18, "stop")])
    assert drafts == ()
    assert 0 < seconds < 1e-5
    # Admitted again, it has computed nothing.
    admit = Admit("a", "a", 19, 10, 0, Sampling(), 100)
    again = replace(verifying("a", 19, (), proposes=1, follows=19), admits=(admit,))
    assert reports(again, 20) == ((21,), 21)
    assert times.runs == [Run(0, 6), Run(6, 7), Run(15, 2), Run(0, 21)]


def test_lanes_draw_at_the_same_time() -> None:
    times = _Counted()
    guesser = ProposingGuesser(Texts(1.0, 0, {"a": 100, "b": 100, "c": 100}), times)
    entries = [
        replace(verifying(id_, 10, (), proposes=3, follows=10).entries[0], lane=lane)
        for id_, lane in (("a", 0), ("b", 1), ("c", 1))
    ]
    step = replace(verifying("a", 10, ()), entries=tuple(entries), lanes=(0, 1))
    drafts, seconds = guesser(step, [Sample(id_, 11) for id_ in "abc"])
    assert len(drafts) == 3
    assert seconds == 2 * (12 + 2)  # the second lane has two requests


def test_no_guess_follows_a_guess_that_ends_the_text() -> None:
    guesser = ProposingGuesser(Texts(1.0, 0, {"a": 15}), _Counted())
    drafts, _ = guesser(verifying("a", 12, (), proposes=4, follows=12), [Sample("a", 12)])
    assert dict(drafts)["a"] == (13, 14)


def test_a_head_draws_at_once_because_the_steps_compute_the_tokens_before() -> None:
    guesser = ProposingGuesser(Texts(1.0, 0, {"a": 100}), DraftTimes(HEAD, H100))
    drafts, seconds = guesser(verifying("a", 5000, (), proposes=2), [Sample("a", 5000)])
    assert dict(drafts)["a"] == (5001, 5002)
    # One round is the output head alone, the second the layer, too.
    assert seconds == pytest.approx(DraftTimes(HEAD, H100).seconds((), [(5001, 2)]))
    assert DraftTimes(HEAD, H100).seconds((), [(5001, 1)]) < seconds / 2


# --- what guesses cost -----------------------------------------------------------------------------------


def test_each_verified_guess_is_a_row_of_the_step_and_of_the_output_head() -> None:
    predictor = Predictor(profile_for(LLAMA3_8B, H100, Topology(tensor=4)), Topology(tensor=4))
    step = verifying("a", 5000, (5001, 5002))
    expected = predictor.tally()
    expected.add_decodes(5000, 1)
    expected.draft(Work(5000, 1), 1)
    expected.draft(Work(5000, 2), 1)
    (seconds,) = PredictorCost(predictor)(step, 0.0).stage_seconds
    assert seconds == pytest.approx(expected.seconds())


def test_the_rank_that_samples_is_busy_for_as_long_as_guesses_are_drawn_and_the_noise_is_the_steps_own() -> (
    None
):
    def slow(_step: Step, _now: float) -> StepTiming:
        return StepTiming((1.0, 1.0), slowness=2.0)

    executor = Executor(
        slow,
        stages=2,
        lanes=1,
        ends_at={"a": 100},
        guesser=ProposingGuesser(Texts(1.0, 0, {"a": 100}), _Counted()),
    )
    (free_at, _), (done_at, done) = executor.launch(
        verifying("a", 10, (), proposes=2, follows=10), 0.0
    ).events
    assert isinstance(done, Done)
    assert done.draft_seconds == 2 * (12 + 1)
    assert (free_at, done_at) == (1.0, 2.0 + done.draft_seconds)
    assert done.compute_seconds == 1.0 + done.draft_seconds


def test_a_rank_measures_a_draft_model_as_its_steps_take_on_one_device() -> None:
    predictor = Predictor(profile_for(LLAMA32_1B, H100, Topology()))
    costs = deployment("draftModel").config().draft_costs
    assert costs is not None
    for rows in (1, 8):
        measured = costs.round_seconds + rows * costs.row_seconds
        assert measured == pytest.approx(predictor.stage_seconds([Work(256, 1)] * rows))
    assert costs.token_seconds * 255 == pytest.approx(
        predictor.stage_seconds([Work(0, 256)]) - predictor.stage_seconds([Work(256, 1)])
    )
    head = deployment("predictionHead").config().draft_costs
    assert head is not None
    assert head.token_seconds == 0.0


@pytest.mark.parametrize("method", DRAFTS)
@pytest.mark.parametrize("kv_bytes", [None, 10**10])
def test_weights_and_kv_of_what_draws_take_memory_of_the_rank_that_samples(
    method: str, kv_bytes: int | None
) -> None:
    grid, draft = Topology(tensor=4, stream=2), DRAFTS[method]
    found = deployment(method, topology=grid, kv_bytes=kv_bytes).kv_tokens()
    room = 0.9 * H100.memory_bytes - LLAMA3_8B.weights_bytes / 8 - draft.weights_bytes
    token_bytes = LLAMA3_8B.kv_bytes_per_token / 8 + draft.kv_bytes_per_token
    assert found == int((room if kv_bytes is None else kv_bytes) / token_bytes)


@pytest.mark.parametrize(("method", "is_kept"), [("draftModel", False), ("predictionHead", True)])
def test_files_and_reads_have_the_kv_of_a_head_and_not_that_of_a_draft_model(
    method: str, is_kept: bool
) -> None:
    own_bytes = 16 * LLAMA3_8B.kv_bytes_per_token / 4
    all_bytes = own_bytes + 16 * DRAFTS[method].kv_bytes_per_token
    rates = {"disk_bytes_per_second": 1e9, "store_bytes_per_second": 2e9, "peer_bytes_per_second": 4e9}
    found = deployment(method, host_bytes=10**11, disk_bytes=10**12, **rates).config()
    assert found.host_tier is not None
    assert found.host_tier.block_bytes == int(all_bytes)
    sent_bytes = all_bytes if is_kept else own_bytes
    assert found.disk_tier is not None
    assert found.disk_tier.blocks == int(10**12 / sent_bytes)
    assert found.disk_tier.read_seconds_per_block == pytest.approx(sent_bytes / 1e9)
    assert found.store_block_seconds == pytest.approx(sent_bytes / 2e9)
    assert found.peer_block_seconds == pytest.approx(sent_bytes / 4e9)


def test_a_draft_model_without_room_is_refused_by_name() -> None:
    with pytest.raises(ConfigInvalid, match=r"Llama-3-8B with Llama-3-70B needs 14\d GB of weights"):
        deployment("draftModel", draft=LLAMA3_70B).kv_tokens()


@pytest.mark.parametrize(
    ("model", "head"), [(LLAMA3_8B, HEAD), (DEEPSEEK_V3, mtp_shape(DEEPSEEK_V3)), (DEEPSEEK_V3, HEAD)]
)
@pytest.mark.parametrize("work", [Work(0, 1), Work(3000, 1), Work(0, 256), Work(100_000, 4096)])
def test_a_step_takes_longer_by_the_layer_of_a_head(model: ModelShape, head: HeadShape, work: Work) -> None:
    grid = Topology(tensor=8)
    plain = Predictor(profile_for(model, H100, grid), grid).stage_seconds([work])
    both = Predictor(with_head(profile_for(model, H100, grid), alone(head, H100)), grid).stage_seconds([work])
    own = alone(head, H100)
    layer = (
        Predictor(own).stage_seconds([work]) - own.launch_seconds - float(own.head.seconds(np.array([1]))[0])
    )
    assert both - plain == pytest.approx(layer, rel=0.01)


# --- what guesses gain -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["promptLookup", "draftModel", "predictionHead"])
def test_the_tokens_of_a_decode_grow_with_the_acceptance(method: str) -> None:
    found = [
        tokens_per_decode(run(deployment(method, chance), streams(2, output_tokens=60)))
        for chance in (0.0, 0.3, 0.6, 0.9, 1.0)
    ]
    assert found[0] == 1.0
    assert all(more > less for less, more in pairwise(found[1:]))
    assert found[1] >= 1.0
    assert found[-1] > 3.5, "of at most 5"


@pytest.mark.parametrize("method", ["promptLookup", "draftModel", "predictionHead"])
@pytest.mark.parametrize(("stages", "replicas"), [(1, 1), (3, 1), (2, 2)])
def test_every_request_gets_each_of_its_tokens_once(method: str, stages: int, replicas: int) -> None:
    lengths = (40, 1, 2, 3, 25, 60)
    made = [
        replace(arrival, output_tokens=length, max_tokens=length if length % 2 else None)
        for arrival, length in zip(streams(6, gap_seconds=0.02).arrivals, lengths, strict=True)
    ]
    log = run(deployment(method, 0.7, topology=Topology(4, stages), replicas=replicas), Workload(made))
    assert [record.tokens for record in log.requests.values()] == list(lengths)
    assert {record.ending for record in log.requests.values()} == {"finished"}
    assert log.guesses is not None
    assert log.guesses.right > 0
    assert (log.guesses.draft_seconds > 0) == (method != "promptLookup")


def test_requests_on_several_lanes_verify_guesses_too() -> None:
    of = deployment(acceptance=0.8, topology=Topology(4, 1, 2), tokens_per_lane=2048)
    log = run(of, streams(3, prompt_tokens=5000))
    assert all(record.tokens == 100 for record in log.requests.values())
    assert tokens_per_decode(log) > 1.5


@pytest.mark.parametrize("method", ["promptLookup", "draftModel", "predictionHead"])
def test_a_run_repeats_itself_and_another_seed_has_other_texts(method: str) -> None:
    of = deployment(method, 0.8)
    first, again, other = (run(of, streams(3, gap_seconds=0.1, output_tokens=40), seed) for seed in (1, 1, 2))
    assert first == again
    assert first.guesses != other.guesses


@pytest.mark.parametrize("method", ["promptLookup", "draftModel", "predictionHead"])
@pytest.mark.parametrize("count", [1, 8, 32])
def test_guesses_that_are_never_right_make_nothing_slower_than_by_5_percent(method: str, count: int) -> None:
    """A head computes its layer in every step, so it is compared with steps that do the same and guess nothing.

    To learn that the guesses of a draft model are wrong takes some 45 ms for 32 new streams. So their outputs are longer.
    """
    plain = deployment("none")
    if method == "predictionHead":
        plain = replace(plain, measured=deployment(method).profile())
    output_tokens = 200 if count == 32 else 100
    both = streams(count, output_tokens=output_tokens)
    without, with_guesses = run(plain, both), run(deployment(method, 0.0), both)
    for id_, record in without.requests.items():
        guessed = with_guesses.requests[id_]
        assert guessed.tokens == record.tokens == output_tokens
        assert (guessed.ttft_seconds or inf) <= 1.05 * (record.ttft_seconds or 0)
        assert (guessed.ended_at or inf) <= 1.05 * (record.ended_at or 0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "acceptance", "gaps_seconds"),
    [("promptLookup", 0.7, (0.2, 0.05, 0.02)), ("draftModel", 0.9, (0.2, 0.1, 0.05))],
)
def test_the_more_load_the_fewer_guesses_and_no_deadline_is_missed_for_them(
    method: str, acceptance: float, gaps_seconds: tuple[float, ...]
) -> None:
    """Prompts fill steps up to the TPOT target, and guesses get what they leave. At intervals of 20 ms, deadlines are missed."""
    depths = []
    for gap_seconds in gaps_seconds:
        both = streams(40, gap_seconds=gap_seconds, prompt_tokens=2000, output_tokens=60)
        without, with_guesses = run(deployment("none"), both), run(deployment(method, acceptance), both)
        depths.append(summarise(with_guesses)["guesses"]["verified_per_decode"])
        missed, missed_with_guesses = (
            {id_ for id_, record in log.requests.items() if not is_good(record)}
            for log in (without, with_guesses)
        )
        assert missed_with_guesses <= missed
    assert all(later < before for before, later in pairwise(depths))
    assert depths[-1] < 0.7 * depths[0]


# --- without speculation, and with wrong settings --------------------------------------------------------


def test_without_speculation_nothing_is_guessed_whatever_the_acceptance() -> None:
    logs = [run(deployment("none", chance), streams(4, gap_seconds=0.1)) for chance in (0.0, 1.0)]
    assert logs[0] == logs[1]
    assert logs[0].guesses is None
    assert "guesses" not in summarise(logs[0])


def manifest(method: str, **scheduling: Any) -> MedhaReplicaSpec:
    return MedhaReplicaSpec.model_validate(
        {
            "model": {"name": "m", "source": {"path": "/m"}, "maxModelLen": 5000},
            "parallelism": {"tensor": 4},
            "scheduling": {"speculation": SPECULATIONS[method]} | scheduling,
        }
    )


def test_a_manifest_gives_the_method_and_its_depth() -> None:
    lookup = deployment_of(manifest("promptLookup"), H100, LLAMA3_8B, acceptance=0.9)
    assert lookup.guesses
    assert lookup.config().draft_costs is None
    assert tokens_per_decode(run(lookup, streams(1))) > 2
    proposed = deployment_of(manifest("draftModel"), H100, LLAMA3_70B, draft_model=LLAMA32_1B, acceptance=0.9)
    assert tokens_per_decode(run(proposed, streams(1, tpot_seconds=0.05))) > 2
    headed = deployment_of(manifest("predictionHead"), H100, DEEPSEEK_V3)
    assert headed.draft == mtp_shape(DEEPSEEK_V3)


def test_settings_that_contradict_each_other_are_refused_with_their_field(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"acceptance is 1\.5; .* from 0 to 1"):
        deployment(acceptance=1.5)
    with pytest.raises(ConfigInvalid, match="acceptance is nan"):
        deployment(acceptance=float("nan"))
    with pytest.raises(ConfigInvalid, match=r"method is draftModel, so .* must be a draft model, not none"):
        deployment_of(manifest("draftModel"), H100, LLAMA3_8B)
    with pytest.raises(ConfigInvalid, match=r"method is promptLookup, so .* must be none, not a draft model"):
        deployment_of(manifest("promptLookup"), H100, LLAMA3_8B, draft_model=LLAMA32_1B)
    with pytest.raises(
        ConfigInvalid, match=r"scheduling\.speculation\.predictionHead\.kind mtp: Llama-3-8B is no DeepSeek"
    ):
        deployment_of(manifest("predictionHead"), H100, LLAMA3_8B)
    profile = tmp_path / "profile.json"
    profile.write_text(profile_for(LLAMA3_8B, H100, Topology(tensor=4)).to_json())
    with pytest.raises(ConfigInvalid, match=r"scheduling\.profile is 'Llama-3-8B on H100.*leave it out"):
        deployment_of(manifest("draftModel", profile=str(profile)), H100, LLAMA3_8B, draft_model=LLAMA32_1B)


def test_systems_that_do_not_guess_are_refused() -> None:
    spec = StudySpec(deployment(), WorkloadSpec(rate=1.0), ("lars", "sarathi-512"), (1,), 5.0)
    with pytest.raises(
        ConfigInvalid, match=r"method is promptLookup, and sarathi-512 is simulated without guesses"
    ):
        spec.check()


# --- the report ------------------------------------------------------------------------------------------


def test_the_page_and_the_json_say_how_tokens_are_guessed_and_what_came_of_it() -> None:
    spec = StudySpec(
        deployment(acceptance=0.75), WorkloadSpec(rate=2.0, long_share=0.0), ("lars",), (1,), 3.0, band=0.0
    )
    key = RunKey("lars", None, 1, 1.0)
    result = StudyResult(spec, None, ((key, simulate_one(spec, key, None)),), planned=1, interrupted=False)
    head, (row,) = table_rows(result.runs)
    cells = dict(zip(head, row, strict=True))
    counts = result.runs[0][1]["guesses"]
    assert cells["tokens a decode"] == f"{counts['tokens_per_decode']:.2f}"
    assert cells["guesses verified a decode"] == f"{counts['verified_per_decode']:.2f}"
    assert cells["of these, right"] == f"{100 * counts['right'] / counts['verified']:.1f} %"
    assert "guessed by promptLookup; each guess is right with a chance of 0.75" in page(of_study(result))
    assert json.loads(json.dumps(result.as_json()))["acceptance"] == 0.75


def test_a_trace_with_its_own_times_is_another_one_for_each_seed_if_guesses_are_by_chance() -> None:
    def depends_on_seed(of: Deployment) -> bool:
        workload = WorkloadSpec(shape="trace")
        return StudySpec(of, workload, ("lars",), (1,), 5.0).depends_on_seed

    assert depends_on_seed(deployment())
    assert not depends_on_seed(deployment("none"))
    assert not depends_on_seed(deployment(acceptance=1.0))
