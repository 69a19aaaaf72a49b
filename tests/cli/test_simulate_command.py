"""`medha simulate` and `medha replay` from outside: their files, their errors, and Ctrl-C."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

from medha_cli.main import main
from medha_cli.simulate_command import command
from medha_sim import study
from medha_sim.guesses import ACCEPTANCE
from medha_worker.checkpoints.eagle3_preset import init_eagle3
from medha_worker.checkpoints.presets import init_checkpoint

ROOT = Path(__file__).parents[2]
WORKING_SECONDS = 5.0  # of processor time
QUICK = ("--quick", "--duration", "3", "--rate", "2", "--hardware", "H100", "--jobs", "1")


def medha(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run(arguments)


def run(
    arguments: Sequence[str], most_file_bytes: int = resource.RLIM_INFINITY, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`most_file_bytes`: no file can become longer, as on a disk that is full."""
    return subprocess.run(
        [sys.executable, "-m", "medha_cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | environment,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most_file_bytes,) * 2),
    )


def test_policies_are_compared_in_a_table_on_a_page_and_in_json(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    done = medha("simulate", *QUICK, "-p", "fcfs,lars", "-o", str(out))
    assert done.returncode == 0, done.stderr
    assert "short: TTFT p50" in done.stdout
    assert "Plotly.newPlot(" in out.read_text(encoding="utf-8")
    found = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    assert [run["system"] for run in found["runs"]] == ["fcfs", "lars"]
    assert found["runs"][0]["result"]["all"]["arrived"] > 0


@pytest.mark.long
def test_longer_prompts_are_not_refused_and_what_is_refused_is_reported(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    longs = ("--long", "1", "--long-scale", "3", "-p", "lars", "-o", str(out))
    done = medha("simulate", *QUICK, *longs)
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))["runs"]
    assert run["result"]["all"]["refused"] == 0
    manifest = tmp_path / "short.yaml"
    manifest.write_text(
        "apiVersion: medha.dev/v1alpha1\nkind: MedhaReplica\nmetadata: {name: a}\n"
        "spec: {model: {name: a, source: {path: a}, maxModelLen: 9000}, parallelism: {tensor: 8}}"
    )
    done = medha("simulate", str(manifest), *QUICK, *longs)
    assert "refused as too_long, the first: " in done.stdout
    assert "tokens, and maxModelLen is 9000; shorten the prompt." in done.stdout


def test_ctrl_c_keeps_what_was_done(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    arguments = ["simulate", "-p", "fcfs,lars", "--rate", "1", "--duration", "10000", "--seeds", "1"]
    command = [sys.executable, "-m", "medha_cli.main", *arguments, "-o", str(out), "-j", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            busy = False
            while not busy:  # importing takes about a second, simulating the rest
                assert process.poll() is None
                children = psutil.Process(process.pid).children()
                busy = any(child.cpu_times().user > WORKING_SECONDS for child in children)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Interrupted: 1 of 6 runs are here" in output
    found = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    assert found["interrupted"] is True
    (run,) = found["runs"]
    assert run["result"]["interrupted"] is True
    assert 0 < run["result"]["window_seconds"] < 10_000
    assert run["result"]["all"]["arrived"] > 0


def test_ctrl_c_while_the_capacity_is_measured_reports_that_nothing_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "measured_capacity", interrupted)
    result = simulate("-o", str(tmp_path / "page.html"))
    assert result.exit_code == 130
    assert "interrupted before anything was done" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_deployment_without_any_capacity_is_reported_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "measured_capacity", lambda *_: 0.0)
    result = simulate("-o", str(tmp_path / "page.html"))
    assert result.exit_code == 2
    assert "the deployment has none: it refuses every request" in " ".join(result.output.split())
    assert list(tmp_path.iterdir()) == []


# --- results are not lost ----------------------------------------------------------------------------


def test_figures_stay_where_the_disk_is_too_full_for_the_page(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    done = run(["simulate", *QUICK, "-p", "fcfs", "-o", str(out)], most_file_bytes=1_000_000)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"--out: {out} cannot be written (File too large); make room, or choose another" in done.stderr
    assert f"the figures are in {out.with_suffix('.json')}" in done.stderr
    assert "short: TTFT p50" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["page.json"]
    assert len(json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))["runs"]) == 1


def test_figures_are_printed_where_nothing_can_be_written(tmp_path: Path) -> None:
    arguments = ["simulate", *QUICK, "-p", "fcfs", "-o", str(tmp_path / "page.html")]
    done = run(arguments, most_file_bytes=16_384, TMPDIR=str(tmp_path))
    assert done.returncode == 1
    assert "the figures are on standard output" in done.stderr
    found, end = json.JSONDecoder().raw_decode(done.stdout.lstrip())
    assert len(found["runs"]) == 1
    assert "short: TTFT p50" in done.stdout.lstrip()[end:]
    assert list(tmp_path.iterdir()) == []


# --- traces ------------------------------------------------------------------------------------------

HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
UNTIMED = ("--columns", "-,num_prefill_tokens,num_decode_tokens")


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", "--quick", "--duration", "1", "-j", "1", *arguments])


@pytest.mark.long
def test_a_trace_with_times_is_run_once_and_shows_no_interval_over_its_seeds(tmp_path: Path) -> None:
    trace, out = tmp_path / "trace.csv", tmp_path / "page.html"
    trace.write_text(HEADER + "0,100,3\n1,100,3\n")
    arguments = ["simulate", "-p", "fcfs", "--duration", "3", "--band", "0", "-j", "1", "--trace", str(trace)]
    done = medha(*arguments, "-o", str(out))
    assert done.returncode == 0, done.stderr
    assert [run["seed"] for run in json.loads(out.with_suffix(".json").read_text())["runs"]] == [1]
    assert "±" not in done.stdout
    assert "±" not in out.read_text(encoding="utf-8").partition("<h2>")[0].partition("</script>")[2]
    refused = medha(*arguments, "--seeds", "3", "-o", str(out))
    assert refused.returncode == 2
    assert "--seeds is 3, but a trace that has its own times" in refused.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--load", "0.5"], "--load 0.5 changes nothing here: a trace has a rate of its own"),
        (["--long", "0.5"], "--long 0.5 changes nothing here"),
        (["--long-scale", "2"], "--long-scale 2.0 changes nothing here"),
        (["--burstiness", "5"], "--burstiness 5.0 changes nothing here: the trace has times of its own"),
    ],
)
def test_options_that_a_trace_ignores_are_refused(tmp_path: Path, options: list[str], words: str) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(HEADER + "0,100,3\n1,100,3\n")
    result = simulate("--trace", str(trace), "-o", str(tmp_path / "page.html"), *options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["trace.csv"]


def test_a_prompt_longer_than_any_replica_takes_is_refused_before_anything_is_simulated(
    tmp_path: Path,
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(HEADER + "0,100,3\n1,10000000000,3\n")
    result = simulate("--trace", str(trace), "-o", str(tmp_path / "page.html"))
    assert result.exit_code == 2
    assert f"{trace}:3: num_prefill_tokens is 10000000000; the replicas' maxModelLen is" in result.stderr
    assert "leave the row out, or simulate a manifest" in result.stderr


def test_requests_of_a_trace_are_of_the_service_classes_of_a_fourth_column(tmp_path: Path) -> None:
    manifest, trace, out = tmp_path / "replica.yaml", tmp_path / "trace.csv", tmp_path / "page.html"
    tiny = (ROOT / "examples/tiny.yaml").read_text()
    assert "serviceClasses" not in tiny
    classes = "  serviceClasses:\n    - name: chat\n    - name: batch\n      ttftFloorSeconds: 60\n"
    manifest.write_text(tiny.replace("spec:\n", "spec:\n" + classes, 1))
    trace.write_text("at,in,out,tier\n0,100,3,batch\n0.1,100,3,chat\n0.2,100,3,\n")
    read = ("--columns", "at,in,out,tier", "--trace", str(trace))
    result = simulate(str(manifest), *read, "-p", "lars", "-o", str(out))
    assert result.exit_code == 0, result.output
    (run,) = json.loads(out.with_suffix(".json").read_text())["runs"]
    assert {name: of["finished"] for name, of in run["result"]["classes"].items()} == {"batch": 1, "chat": 2}
    assert "TTFT by service class" in out.read_text(encoding="utf-8")


# --- speculation -------------------------------------------------------------------------------------


def speculating(folder: Path, speculation: str) -> str:
    """A manifest with this speculation."""
    manifest = folder / "replica.yaml"
    manifest.write_text(
        "apiVersion: medha.dev/v1alpha1\nkind: MedhaReplica\nmetadata: {name: a}\n"
        "spec: {model: {name: a, source: {path: a}, maxModelLen: 9000}, parallelism: {tensor: 8}, "
        f"scheduling: {{speculation: {speculation}}}}}"
    )
    return str(manifest)


LOOKUP = "{method: promptLookup}"
DRAFT = "{method: draftModel, draftModel: {path: b}}"
EAGLE3 = "{method: predictionHead, predictionHead: {kind: eagle3, source: {path: b}}}"
MTP = "{method: predictionHead, predictionHead: {kind: mtp}}"


def test_the_table_shows_how_many_tokens_guesses_bring(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    manifest = speculating(tmp_path, LOOKUP)
    result = simulate(
        manifest, "--rate", "4", "--long", "0", "--acceptance", "0.9", "-p", "lars", "-o", str(out)
    )
    assert result.exit_code == 0, result.output
    assert "tokens a decode" in result.stdout
    found = json.loads(out.with_suffix(".json").read_text())
    assert found["acceptance"] == 0.9
    assert found["runs"][0]["result"]["guesses"]["tokens_per_decode"] > 2


def test_the_sizes_of_a_draft_model_and_of_a_head_are_read_from_their_folders(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    init_checkpoint(tmp_path / "draft", preset="tiny", seed=0)
    init_eagle3(tmp_path / "head", tmp_path / "draft", seed=0)
    for speculation, option, folder in (
        (DRAFT, "--draft-model", tmp_path / "draft"),
        (EAGLE3, "--prediction-head", tmp_path / "head"),
    ):
        manifest = speculating(tmp_path, speculation)
        result = simulate(
            manifest, option, str(folder), "--rate", "4", "--long", "0", "-p", "lars", "-o", str(out)
        )
        assert result.exit_code == 0, result.output
        found = json.loads(out.with_suffix(".json").read_text())
        assert found["draft"] == folder.name
        assert found["runs"][0]["result"]["guesses"]["verified"] > 0


@pytest.mark.parametrize(
    ("speculation", "arguments", "words"),
    [
        (None, ["--acceptance", "0.7"], "--acceptance 0.7 changes nothing here: there is no manifest that speculates"),
        ("{method: none}", ["--acceptance", "0.7"], "--acceptance 0.7 changes nothing here"),
        (LOOKUP, ["--acceptance", "1.5"], "Invalid value for '--acceptance': 1.5 is not in the range 0<=x<=1"),
        (LOOKUP, ["--acceptance", "nan"], "Invalid value for '--acceptance': nan is no finite number"),
        (None, ["--draft-model", "Llama-3-8B"], "--draft-model Llama-3-8B changes nothing here: no manifest with"),
        (LOOKUP, ["--prediction-head", "b"], "--prediction-head b changes nothing here: no manifest with"),
        (MTP, ["--prediction-head", "b"], "predictionHead.source is given; leave it out"),
        (DRAFT, [], "--draft-model is missing: the manifest has scheduling.speculation.draftModel, whose shape"),
        (EAGLE3, [], "--prediction-head is missing: the manifest has scheduling.speculation.predictionHead.source"),
        (DRAFT, ["--draft-model", "GPT-5"], "--draft-model GPT-5: neither a preset (Llama-3-8B"),
        (EAGLE3, ["--prediction-head", "nowhere"], "--prediction-head nowhere: [Errno 2] No such file"),
        (MTP, [], "predictionHead.kind mtp: Llama-3-8B is no DeepSeek-V3, which alone has MTP layers; choose that"),
        (LOOKUP, ["-p", "lars,sarathi-512"], "method is promptLookup, and sarathi-512 is simulated without guesses"),
    ],
)  # fmt: skip
def test_wrong_options_on_speculation_are_refused_with_their_fix(
    tmp_path: Path, speculation: str | None, arguments: list[str], words: str
) -> None:
    manifest = [] if speculation is None else [speculating(tmp_path, speculation)]
    result = simulate(*manifest, "--rate", "1", "-o", str(tmp_path / "page.html"), *arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


def test_the_default_acceptance_is_the_simulators() -> None:
    (option,) = [one for one in command.params if one.name == "acceptance"]
    assert option.default == ACCEPTANCE


# --- wrong options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", "fifo"], "--policies names 'fifo'; there are fcfs"),
        (["-p", ","], "--policies is empty"),
        (["--model", "GPT-5"], "--model is 'GPT-5'; choose one of Llama-3-8B"),
        (["--hardware", "abacus"], "--hardware is 'abacus'; choose one of"),
        (["--topology", "8x2"], "--topology is '8x2'; write tensor x stream x kv ranks"),
        (["--topology", "0x2x1"], "--topology is '0x2x1'; write tensor x stream x kv ranks"),
        (["--load", "much"], "--load is 'much'; write shares of the capacity"),
        (["--load", "-1"], "--load is '-1'"),
        (["--conversations"], "--conversations needs --rate"),
        (["--conversations", "--trace", "x.csv"], "simulate one of them at a time"),
        (["--trace", "nowhere.csv"], "nowhere.csv: cannot be read"),
        (["--columns", "a,b"], "--columns is 'a,b'; name three"),
        (["--model", "Llama-3-70B", "--topology", "1x1x1"], "needs 141 GB of weights on each of 1 ranks"),
        (["--rate", "0"], "Invalid value for '--rate': 0.0 is not in the range x>0"),
        (["--rate", "-1"], "Invalid value for '--rate': -1.0"),
        (["--rate", "0", "--trace", "x.csv", *UNTIMED], "Invalid value for '--rate': 0.0"),
        (["--rate", "1e9"], "rate is 1e+09 a second for 1 s, which makes 1e+09 requests; lower one of them"),
        (["--topology", "8x40x1"], "parallelism.stream is 40, but Llama-3-8B has 32 layers"),
        (["-p", "lars,sarathi-512", "--topology", "8x1x2"], "sarathi-512 runs on one lane, 8 GPUs, but"),
        (["-p", "loongserve", "--topology", "1x1x1"], "loongserve runs on 1 or more instances of TP2, but"),
        (["--seeds", "2"], "--seeds 2 changes nothing here: --quick is one seed without a band"),
        (["--band", "0.1"], "--band 0.1 changes nothing here: --quick is one seed"),
        (["--duration", "130"], "--duration 130.0 changes nothing here: --quick lasts 120 s at most"),
        (["--rate", "nan"], "Invalid value for '--rate': nan is no finite number"),
        (["--duration", "nan"], "Invalid value for '--duration': nan is no finite number"),
        (["--rate", "1", "--load", "0.5"], "--load 0.5 changes nothing here: --rate is given too"),
        (["--rate", "1", "--columns", "a,b,c"], "--columns a,b,c changes nothing here: there is no --trace"),
        (["--conversations", "--rate", "1", "--open-ended"], "--open-ended changes nothing here"),
        (["--conversations", "--rate", "1", "--long", "0"], "--long 0.0 changes nothing here"),
        (["nowhere.yaml"], "nowhere.yaml: cannot be read"),
        ([str(ROOT / "examples/tiny.yaml"), "--topology", "1x1x1"], "has its own; leave one of them out"),
        (["-o", "nowhere/page.html"], "--out is nowhere/page.html, whose folder does not exist"),
        (["-o", f"{__file__}/page.html"], "page.html, whose folder is a file; make it or choose another"),
        (["-o", "/dev/null"], "--out: /dev/null exists and is not a plain file; choose another"),
        (["-o", "/proc/page.html"], "--out: /proc/page.html cannot be written"),
        (["-o", ""], "it names the HTML page"),
        (["-o", "page.json"], "the JSON is written beside it"),
    ],
)
def test_wrong_options_are_refused_with_their_fix(arguments: list[str], words: str) -> None:
    result = simulate(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", "fcfs", "--set", "policy=edf"], "--set is 'policy=edf'; name policies with --policies"),
        (["--set", "maxChunkTokens=["], "whose value is no YAML (expected the node content"),
        (["--set", "maxChunkTokens=8", "--set", "maxChunkTokens=9"], "a field has one value, leave one out"),
        (["--set", "maxChunkTokens"], "--set is 'maxChunkTokens'; write FIELD=VALUE"),
        (["-o", "page.html"], "--out page.html changes nothing here: nothing is compared"),
        (["--seeds", "3"], "--seeds 3 changes nothing here: nothing is compared"),
        (["-p", "lars", "-o", "nowhere/page.html"], "whose folder does not exist"),
        (["-p", "lars", "-o", "log.html"], "--out: log.json is read by this command; choose another"),
    ],
)
def test_wrong_options_of_a_replay_are_refused_before_its_log_is_read(
    arguments: list[str], words: str
) -> None:
    result = CliRunner().invoke(main, ["replay", "log.json", *arguments])
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


def test_help_shows_examples() -> None:
    for name in ("simulate", "replay"):
        result = CliRunner().invoke(main, [name, "--help"])
        assert result.exit_code == 0
        assert f"Examples:\n    medha {'simulate --quick' if name == 'simulate' else 'up'}" in result.stdout


def test_a_replay_of_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("{}\n")
    for arguments, words in (
        (["nowhere.jsonl"], "cannot be read"),
        ([str(tmp_path / "log.jsonl")], "a record of `medha up --record` begins with"),
    ):
        result = CliRunner().invoke(main, ["replay", *arguments])
        assert result.exit_code == 2
        assert words in result.stderr
