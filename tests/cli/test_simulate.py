"""`medha simulate` and `medha replay` from outside: their files, their errors, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from medha_cli.main import main

ROOT = Path(__file__).parents[2]
WORKING_SECONDS = 5.0  # of processor time
QUICK = ("--quick", "--duration", "3", "--rate", "2", "--hardware", "H100", "--jobs", "1")


def medha(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "medha_cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_policies_are_compared_in_a_table_on_a_page_and_in_json(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    done = medha("simulate", *QUICK, "-p", "fcfs,lars", "-o", str(out))
    assert done.returncode == 0, done.stderr
    assert "short: TTFT p50" in done.stdout
    assert "Plotly.newPlot(" in out.read_text(encoding="utf-8")
    found = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    assert [run["system"] for run in found["runs"]] == ["fcfs", "lars"]
    assert found["runs"][0]["result"]["all"]["arrived"] > 0


def test_longer_prompts_are_not_refused_and_what_is_refused_is_told(tmp_path: Path) -> None:
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
    assert "refused, 0 failed" in done.stdout


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", "fifo"], "--policies names 'fifo'; there are fcfs"),
        (["-p", ","], "--policies is empty"),
        (["--model", "GPT-5"], "model is 'GPT-5'; shapes are known of Llama-3-8B"),
        (["--hardware", "abacus"], "hardware is 'abacus'; descriptions exist of"),
        (["--topology", "8x2"], "--topology is '8x2'; write tensor x stream x kv ranks"),
        (["--topology", "0x2x1"], "parallelism.tensor is 0"),
        (["--load", "much"], "--load is 'much'; write shares of the capacity"),
        (["--load", "-1"], "--load is '-1'"),
        (["--conversations"], "--conversations needs --rate"),
        (["--conversations", "--trace", "x.csv"], "simulate one of them at a time"),
        (["--trace", "nowhere.csv"], "nowhere.csv: cannot be read"),
        (["--columns", "a,b"], "--columns is 'a,b'; name three"),
        (["--model", "Llama-3-70B", "--topology", "1x1x1"], "needs 141 GB of weights on each of 1 ranks"),
        (["--rate", "0"], "rate is 0"),
        (["nowhere.yaml"], "nowhere.yaml: cannot be read"),
        ([str(ROOT / "examples/tiny.yaml"), "--topology", "1x1x1"], "has its own; leave one of them out"),
        (["-o", "nowhere/page.html"], "whose folder does not exist"),
        (["-o", "page.json"], "the JSON is written beside it"),
    ],
)
def test_wrong_options_are_told_with_their_mend(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(main, ["simulate", "--quick", "--duration", "1", "-j", "1", *arguments])
    assert result.exit_code == 2
    assert words in result.stderr


def test_help_shows_examples() -> None:
    for name in ("simulate", "replay"):
        result = CliRunner().invoke(main, [name, "--help"])
        assert result.exit_code == 0
        assert f"Examples:\n    medha {'simulate --quick' if name == 'simulate' else 'up'}" in result.stdout


def test_a_replay_of_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("{}\n")
    for arguments, words in (
        (["nowhere.jsonl"], "cannot be read"),
        ([str(tmp_path / "log.jsonl")], "a log of `medha up --record` begins with"),
    ):
        result = CliRunner().invoke(main, ["replay", *arguments])
        assert result.exit_code == 2
        assert words in result.stderr
