"""`make gpu-check` runs on a machine without any package of ours, resumes, and refuses to prove something on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmark import FOLDER, benchmark
from clients.packages import installed

ROOT = FOLDER.parent
gpu = benchmark("gpu")

# What a machine with a GPU may lack: everything but torch, numpy, safetensors and transformers.
WITHOUT_OURS = """
import runpy, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"pydantic", "zmq", "kopf", "kubernetes", "orjson"}:
            raise ImportError(f"no {name} here")

sys.meta_path.insert(0, Missing())
del sys.argv[0]
script = sys.argv[0]
sys.path.insert(0, script.rpartition("/")[0])
runpy.run_path(script, run_name="__main__")
"""


def run(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_OURS, str(FOLDER / "gpu.py"), *arguments]
    path = {
        "PYTHONPATH": f"{ROOT / 'core'}:{ROOT / 'worker'}",
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(command, capture_output=True, text=True, check=check, timeout=800, env=path)


@pytest.mark.long
@pytest.mark.parametrize(
    "part",
    [
        "numerics",
        *(
            pytest.param(one, marks=pytest.mark.long)
            for one in (
                "families",
                "quantised",
                "sampling",
                "graphs",
                "determinism",
                "chunks",
                "fp8_kv",
                "tiers",
                "peers",
            )
        ),
    ],
)
@pytest.mark.timeout(900)  # more than twenty models, on a busy machine
def test_a_part_runs_without_our_packages(part: str) -> None:
    found = json.loads(run("--inside", part, "--quick").stdout.splitlines()[-1])
    match part:
        case "numerics":
            assert found["error"] < 1e-4
            assert all(row["ours"] < 1e-5 for row in found["attention"])
        case "determinism":
            assert [row["rows"] for row in found["steps"]] == [128, 1, 8]
        case "sampling":
            assert (found["differ"], found["samples"] > 0) == (0, True)
        case "graphs":
            assert found["error"] == 0
        case "families" | "quantised":
            assert [row for row in found["models"] if row.get("error", 1.0) > 1.1 * row["cpu_error"]] == []
            # A CPU has torch's operators for INT8 and FP8, and neither that for INT4 nor that for blocks.
            right = {row["form"] for row in found.get("products", []) if row["is_right"]}
            assert right == ({"INT8", "FP8"} if part == "quantised" else set())
        case "fp8_kv":
            assert found["rounded_otherwise"] == 0
            assert all(row["ours"] < 1e-5 for row in found["attention"])
            assert all(row["fp8_seconds"] > 0 for row in found["steps"])
        case "tiers":
            assert (found["differ"], found["pools"]) == (0, 4)
        case "peers":
            assert all(found[key] > 0 for key in found)
        case "chunks":
            assert {row["chunks"] for row in found["prefills"]} == {"static 32", "static 128", "adaptive"}


STUB = """
import time

class SamplingParams:
    def __init__(self, **fields):
        self.tokens = fields["max_tokens"]

class Answer:
    def __init__(self, tokens):
        self.outputs, self.token_ids = [self], [0] * tokens

class LLM:
    def __init__(self, **fields):
        print("an engine that talks")
        {behaviour}

    def generate(self, prompts, sampling, use_tqdm):
        return [Answer(sampling.tokens) for _ in prompts]

__version__ = "1.2.3"
"""


def interpreter_with_vllm(folder: Path, behaviour: str, device: str = "cpu") -> Path:
    """Make an interpreter that has an imitation of vLLM."""
    package = folder / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STUB.format(behaviour=behaviour))
    (package / "platforms.py").write_text(f"class current_platform:\n    device_type = {device!r}\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder / "site"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def place(**fields: Any) -> Any:
    return gpu.Place(gpu.host_device(gpu.torch.float32), gpu.QUICK, **fields)


def test_without_vllm_the_part_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda _: None)
    assert "install vLLM into an environment, and name its interpreter" in gpu.vllm(place())["skipped"]
    said = gpu.vllm(place(vllm_python=interpreter_with_vllm(tmp_path, "raise ImportError", "tpu")))["skipped"]
    assert said.startswith("this vLLM is built for tpu, and the engine runs on cpu; install vLLM for cpu in")
    (tmp_path / "site" / "vllm" / "__init__.py").write_text("import libtorch_of_another_release")
    said = gpu.vllm(place(vllm_python=tmp_path / "python"))["skipped"]
    assert "cannot import vLLM (No module named 'libtorch_of_another_release'); install it there" in said


def test_a_vllm_that_fails_or_hangs_fails_the_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failing = interpreter_with_vllm(tmp_path / "failing", "raise ValueError('no kernel')")
    with pytest.raises(RuntimeError, match=r"exit status 1:(?s:.*)ValueError: no kernel"):
        gpu.vllm(place(vllm_python=failing))
    monkeypatch.setattr(gpu, "_VLLM_SECONDS", 0.1)
    hanging = interpreter_with_vllm(tmp_path / "hanging", "time.sleep(1000)")
    with pytest.raises(RuntimeError, match=r"exit status none within 0\.1 s"):
        gpu.vllm(place(vllm_python=hanging))


def test_vllm_does_not_outlive_the_part_that_waits_for_it(tmp_path: Path) -> None:
    python = interpreter_with_vllm(tmp_path, "print('begun', flush=True); time.sleep(1000)")
    order = {"sequences": 1, "context": 1, "prompt": 1, "config": {}, "device": "cpu", "dtype": "float32",
             "largest_chunk": 1, "is_eager": True}  # fmt: skip
    command = [str(python), str(FOLDER / "gpu_vllm.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(order) + "\n")
        child.stdin.flush()
        assert child.stdout.readline() == "an engine that talks\n"
        assert child.stdout.readline() == "begun\n"
        child.stdin.close()
        assert child.wait(60) == 1


@pytest.mark.parametrize("is_real", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.timeout(1800)  # the real one may be downloaded first
def test_vllm_is_timed_at_the_same_sizes(tmp_path: Path, is_real: bool) -> None:
    python = installed("vllm") / "bin" / "python" if is_real else interpreter_with_vllm(tmp_path, "pass")
    found = gpu.vllm(place(vllm_python=python))
    assert (found["prompt"], found["sequences"], found["context"]) == (256, 4, 128)
    assert {"prefill_seconds", "decode_seconds", "vllm_prefill_seconds", "vllm_decode_seconds"} <= set(found)
    assert found["prefill_seconds"] > 0
    if is_real:
        assert found["vllm_prefill_seconds"] > 0
        assert found["vllm_decode_seconds"] > 0


def test_a_part_that_was_skipped_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "gpu.json"
    parts = {name: {"device": "cpu"} for name in gpu.PARTS} | {"vllm": {"skipped": "there was none"}}
    target.write_text(json.dumps({"sources": gpu.sources(), "parts": parts}))
    ran: list[tuple[str, Any]] = []

    def run_part(name: str, **fields: Any) -> dict[str, float]:
        ran.append((name, fields["vllm_python"]))
        return {
            "decode_seconds": 1.0,
            "prefill_seconds": 1.0,
            "vllm_decode_seconds": 2.0,
            "vllm_prefill_seconds": 4.0,
        }

    monkeypatch.setattr(gpu, "_run_part", run_part)
    arguments = ["gpu.py", "--quick", "--json", str(target), "--vllm-python", sys.executable]
    monkeypatch.setattr(sys, "argv", arguments)
    gpu.main()
    assert ran == [("vllm", Path(sys.executable))]
    parts = {"facts": {"device": "cuda:0"}, "vllm": json.loads(target.read_text())["parts"]["vllm"]}
    assert [(claim["value"], claim["peer"]) for claim in gpu.claims_of(parts)] == [
        (0.25, "vllm"),
        (0.5, "vllm"),
    ]


def test_a_cpu_proves_nothing() -> None:
    refused = run("--part", "facts", check=False)
    assert refused.returncode == 1
    assert "torch sees no GPU here, so nothing can be proved" in refused.stderr


def test_parts_of_the_same_sources_are_kept_and_others_are_not(tmp_path: Path) -> None:
    target = tmp_path / "gpu.json"
    target.write_text(json.dumps({"sources": gpu.sources(), "parts": {"facts": {"device": "cuda:0"}}}))
    assert gpu._earlier(target)["parts"] == {"facts": {"device": "cuda:0"}}
    target.write_text(json.dumps({"sources": "0" * 12, "parts": {"facts": {"device": "cuda:0"}}}))
    assert gpu._earlier(target)["parts"] == {}


def mixed(seconds: dict[int, float]) -> list[dict[str, float]]:
    """Return measured steps whose time depends on the chunk alone, and doubles with the context."""
    return [
        {"context": context, "chunk": chunk, "seconds": taken * (1 + context / 1000)}
        for chunk, taken in seconds.items()
        for context in (0, 1000)
    ]


def test_a_prefill_is_summed_up_over_its_chunks() -> None:
    rows = {row["chunks"]: row for row in gpu.prefills(mixed({100: 0.02, 500: 0.04}), 1000, 1.0)}
    assert rows["static 500"]["seconds"] == pytest.approx(0.04 + 0.04 * 1.5)
    assert rows["static 500"]["longest_step"] == pytest.approx(0.06)
    # 500 tokens stay within 50 ms up to a context of 250 tokens.
    assert rows["adaptive"]["longest_step"] <= 0.05
    assert rows["adaptive"]["seconds"] < rows["static 100"]["seconds"]


def test_small_models_and_fp8_are_claimed_by_what_is_wrong() -> None:
    models = [
        {"error": 0.02, "cpu_error": 0.015},
        {"error": 0.04, "cpu_error": 0.015},
        {"failed": "RuntimeError: no kernel"},
    ]
    attention = [{"ours": 3e-3, "torch": 1e-3}]
    steps = [
        {"sequences": 1, "context": context, "seconds": 1.0, "fp8_seconds": 0.6}
        for context in (131_072, 1024)
    ]
    parts = {
        "facts": {"device": "cuda:0"},
        "families": {"models": models},
        "quantised": {"models": models[:1]},
        "fp8_kv": {"rounded_otherwise": 3, "attention": attention, "steps": steps},
        "tiers": {"differ": 2},
    }
    assert [claim["value"] for claim in gpu.claims_of(parts)] == [2, 2, 0, 3, pytest.approx(3.0), 0.6]


def test_claims_about_speed_come_from_a_gpu_alone() -> None:
    parts = {
        "ceilings": {"teraflops": 700.0, "gigabytes_per_second": 3000.0},
        "prefill": {"last_chunks": [{"context": 131_072, "teraflops_per_second": 350.0}]},
        "decode": {"steps": [{"sequences": 1, "context": 900_000, "gigabytes_per_second": 2850.0}]},
        "sampling": {"differ": 1},
    }
    assert [claim["value"] for claim in gpu.claims_of(parts)] == [1]
    values = {
        claim["name"]: claim["value"] for claim in gpu.claims_of({"facts": {"device": "cuda:0"}, **parts})
    }
    assert values["MFU of the last chunk of 131,072 tokens"] == 50
    assert values["MBU of 1 decodes behind 900,000 tokens"] == 95
