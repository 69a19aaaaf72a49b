"""Tools of other projects measure `medha up`, by load and by likelihood, and their own reports are right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from .conftest import MODEL, Client

pytestmark = pytest.mark.long

REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS = 12, 64, 16
QUESTIONS = [
    {"question": "Which colour has grass?", "choices": ["green", "red", "as blue as the sky"], "label": 0},
    {"question": "Which colour has blood?", "choices": ["white", "red", "none"], "label": 1},
    {"question": "Is snow white?", "choices": ["yes", "no"], "label": 0},
]


def test_vllm_bench_serve_counts_every_token(client: Callable[[str], Client], tmp_path: Path) -> None:
    vllm = client("vllm")
    for backend, path in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
        vllm.run(
            "vllm", "bench", "serve", "--backend", backend, "--base-url", vllm.url, "--endpoint", path,
            "--tokenizer", vllm.checkpoint, "--dataset-name", "random", "--num-prompts", REQUESTS,
            "--random-input-len", INPUT_TOKENS, "--random-output-len", OUTPUT_TOKENS, "--request-rate", 8,
            "--ignore-eos", "--percentile-metrics", "ttft,tpot,itl,e2el", "--goodput", "ttft:60000", "tpot:60000",
            "--save-result", "--result-dir", tmp_path, "--result-filename", f"{backend}.json",
        )  # fmt: skip
        found = json.loads((tmp_path / f"{backend}.json").read_text())
        assert (found["completed"], found["failed"]) == (REQUESTS, 0)
        assert found["model_id"] == MODEL, "the model of /v1/models"
        assert found["total_output_tokens"] == REQUESTS * OUTPUT_TOKENS
        assert found["request_goodput"] == pytest.approx(found["request_throughput"])
        assert 0 < found["median_ttft_ms"] < found["median_e2el_ms"]
        named = {"tokenizer_id"}  # a path of this run
        vllm.report[backend] = {
            name: value for name, value in found.items() if not isinstance(value, list) and name not in named
        }
        vllm.exercised.append(f"`vllm bench serve --backend {backend}`, with `--goodput`")


def test_guidellm_completes_every_request(client: Callable[[str], Client], tmp_path: Path) -> None:
    guidellm = client("guidellm")
    target = tmp_path / "found.json"
    for profile in ("kind=concurrent,streams=4", "kind=poisson,rate=8"):
        guidellm.run(
            "guidellm", "run", "--backend", f"kind=openai_http,target={guidellm.url}",
            "--tokenizer", f"kind=hf_auto,model={guidellm.checkpoint}", "--profile", profile,
            "--data", f"kind=synthetic_text,prompt_tokens={INPUT_TOKENS},output_tokens={OUTPUT_TOKENS}",
            "--constraint", f"kind=max_requests,count={REQUESTS}", "--output", f"kind=json,path={target}",
            "--disable-progress",
        )  # fmt: skip
        (found,) = json.loads(target.read_text())["benchmarks"]
        totals = found["metrics"]["request_totals"]
        assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)
        output = found["metrics"]["output_token_count"]["successful"]
        assert output["mean"] == OUTPUT_TOKENS
        first = found["metrics"]["time_to_first_token_ms"]["successful"]
        assert first["median"] > 0
        guidellm.exercised.append(f"`guidellm run --profile {profile}`")
        guidellm.report[profile] = {"requests": totals, "output_tokens": output["mean"]}


def test_aiperf_completes_every_request(client: Callable[[str], Client], tmp_path: Path) -> None:
    aiperf = client("aiperf")
    for kind in ("chat", "completions"):
        aiperf.run(
            "aiperf", "profile", "--model", MODEL, "--url", aiperf.url, "--endpoint-type", kind, "--streaming",
            "--tokenizer", aiperf.checkpoint, "--request-count", REQUESTS, "--concurrency", 4,
            "--synthetic-input-tokens-mean", INPUT_TOKENS, "--output-tokens-mean", OUTPUT_TOKENS,
            "--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--server-metrics", aiperf.server.metrics_url,
            "--artifact-dir", tmp_path / kind, "--ui", "none", HF_HUB_OFFLINE="", HF_DATASETS_OFFLINE="",  # offline it takes no folder
        )  # fmt: skip
        (path,) = (tmp_path / kind).rglob("profile_export_aiperf.json")
        found = json.loads(path.read_text())
        assert found["request_count"]["avg"] == REQUESTS
        assert found["output_sequence_length"]["avg"] == OUTPUT_TOKENS
        assert found["time_to_first_token"]["p50"] > 0
        (path,) = (tmp_path / kind).rglob("server_metrics_export.json")
        assert "medha_requests" in path.read_text()
        aiperf.exercised.append(
            f"`aiperf profile --endpoint-type {kind} --streaming`, which also reads `/metrics`"
        )
        aiperf.report[kind] = {
            name: value for name, value in found.items() if isinstance(value, dict) and "avg" in value
        }


def test_likelihoods_of_lm_eval_are_those_of_transformers(
    client: Callable[[str], Client], tmp_path: Path
) -> None:
    lm_eval = client("lm-eval")
    write_tasks(tmp_path)
    arguments = (
        f"model={MODEL},base_url={lm_eval.url}/v1/completions,tokenizer={lm_eval.checkpoint},num_concurrent=4"
    )
    lm_eval.run(
        "lm-eval", "run", "--model", "local-completions", "--model_args", arguments, "--include_path", tmp_path,
        "--tasks", "medha_choices,medha_passages,medha_answers", "--output_path", tmp_path / "found", "--log_samples",
    )  # fmt: skip
    reference = Reference(lm_eval.checkpoint)
    choices, passages, answers = (samples(tmp_path, task) for task in ("choices", "passages", "answers"))
    assert len(choices) == len(passages) == len(answers) == len(QUESTIONS)
    for sample in choices:
        for (likelihood, greedy), (context, continuation) in zip(
            sample["filtered_resps"], pairs(sample), strict=True
        ):
            wanted, is_greedy = reference.likelihood(context, continuation)
            assert float(likelihood) == pytest.approx(wanted, abs=1e-3)
            assert greedy == str(is_greedy)
    for sample in passages:
        (text,) = pairs(sample)[0]
        assert float(sample["filtered_resps"][0]) == pytest.approx(reference.rolling(text), abs=1e-3)
    for sample in answers:
        assert sample["filtered_resps"][0] == reference.continued(pairs(sample)[0][0], 12)
    (path,) = (tmp_path / "found").rglob("results_*.json")
    lm_eval.report = json.loads(path.read_text())["results"]
    lm_eval.exercised = [
        "`local-completions`: `loglikelihood` of a multiple choice, each equal to that of transformers",
        "`local-completions`: `loglikelihood_rolling`, equal to that of transformers",
        "`local-completions`: `generate_until`, the greedy text of transformers",
    ]


def write_tasks(folder: Path) -> None:
    """Write three tasks of lm-eval that load nothing but a file beside them."""
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    asked = "Question: {{question}}\nAnswer:"
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
    }
    tasks: dict[str, dict[str, Any]] = {
        "choices": {
            "output_type": "multiple_choice", "doc_to_text": asked, "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{label}}", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "passages": {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}}",
            "metric_list": [{"metric": "bits_per_byte"}],
        },
        "answers": {
            "output_type": "generate_until", "doc_to_text": asked, "doc_to_target": "{{choices[label]}}",
            "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12}, "metric_list": [{"metric": "exact_match"}],
        },
    }  # fmt: skip
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": f"medha_{name}", **common, **task}))


def samples(folder: Path, task: str) -> list[dict[str, Any]]:
    (path,) = (folder / "found").rglob(f"samples_medha_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def pairs(sample: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the texts of each request of a sample: context and continuation."""
    return [tuple(one[name] for name in sorted(one)) for one in sample["arguments"].values()]


class Reference:
    """Likelihoods by transformers, with the tokens that lm-eval has."""

    def __init__(self, checkpoint: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def likelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        """Return the log-probability of a continuation, and whether greedy sampling would say it."""
        whole, before = self._ids(context + continuation), self._ids(context)
        return self._score(whole, len(before))

    def rolling(self, text: str) -> float:
        """Return the log-probability of a text, behind the token with which lm-eval begins it."""
        return self._score([self._tokenizer.bos_token_id, *self._ids(text)], 1)[0]

    def continued(self, prompt: str, tokens: int) -> str:
        ids = torch.tensor([self._ids(prompt)])
        out = self._model.generate(ids, max_new_tokens=tokens, do_sample=False)
        return str(self._tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def _score(self, ids: list[int], begin: int) -> tuple[float, bool]:
        with torch.inference_mode():
            natural = torch.log_softmax(self._model(torch.tensor([ids])).logits[0], dim=-1)
        rows, wanted = natural[begin - 1 : -1], torch.tensor(ids[begin:])
        scores = rows.gather(1, wanted[:, None])
        return float(scores.sum()), bool((rows.argmax(dim=-1) == wanted).all())
