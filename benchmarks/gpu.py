"""Prove and measure the engine on a GPU (`make gpu-check`).

    python benchmarks/gpu.py --quick                  small sizes; without a GPU, on the CPU: shows that the script works
    python benchmarks/gpu.py --json benchmarks/results/gpu.json
    python benchmarks/gpu.py --part numerics --part graphs --json benchmarks/results/gpu.json
    python benchmarks/gpu.py --vllm-python /opt/vllm/bin/python --json benchmarks/results/gpu.json

It needs torch, numpy, safetensors and `transformers`; FlashInfer and vLLM are used if they can be imported. Each part runs in a process
of its own, so that a fault on the device ends only that part. After each part the results are written; the same command goes
on with what is missing, as long as the sources of the engine (`sources` in the file) are the same.

* facts: the device, its driver, what NVML reports of it, and the versions of the libraries;
* numerics: every kind of attention, and a model of four wide layers in chunks and decodes, in the dtype that is served. The
  error is that against float64 or float32, over the error of `transformers` or of torch in the same dtype;
* determinism: whether the batch-invariant kernels get equal bits in any batch here, and what they cost, without captures;
* sampling: the same tokens as on the CPU, for every sampling option, from the same logits;
* families, quantised: a small model of each family, and of each form of quantised weights, in chunks and captured decodes. The
  error is that of a row in bfloat16 against float32 on the CPU, over the error of bfloat16 on the CPU. Also single products of each
  form that has one of its own: their error against the product of numbers that are made for it, and the times of both;
* graphs: captured decodes against eager ones, while the next step is prepared; the memory that captures take;
* ceilings: the matrix product and the copy that this device reaches, by which everything below is divided; and the product's
  time between two marks of the device, over the time that the host waits for it;
* prefill, decode: MFU and MBU of an 8B model's layers, at long contexts and many sequences;
* chunks: what a chunk of 32 tokens costs more than a large one, for each token; and adaptive chunks against every static one:
  the time of a whole prefill, and the longest step, beside 16 decodes;
* overhead: what a captured decode step costs beyond its kernels;
* fp8_kv: attention over a pool of FP8 as in `numerics`, rounding to FP8 against the CPU's, and decodes over such a pool;
* tiers: blocks that go to pinned host memory and come back, and how fast;
* peers: a whole prefill and decode steps beside those of `transformers` with the same weights;
* vllm: the same beside vLLM's engine with weights of its own, where an interpreter has it (`--vllm-python`). Its times include
  its scheduling and sampling, ours the output head and the choice of the best token, but no controller;
* nccl: an all-reduce of one rank, captured and replayed; an exchange with itself; an abort while a captured step exists;
* races: the kernels' accesses under compute-sanitizer, where there is one.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from gpu_sources import sources
from harness import Row, claim, exit_with, parser, progress, report, save, table
from random_llama import LLAMA3_8B, SMALL, LlamaShape, config_fields, random_model

from medha.errors import ConfigInvalid
from medha.kv.host_tier import TierCopy
from medha.model.kv_dtype import KvDtype
from medha.wire.messages import Sampling
from medha_worker.checkpoints.presets import ARCHITECTURES, init_checkpoint
from medha_worker.checkpoints.quantised_checkpoint import QUANTISATIONS
from medha_worker.device import Device, host_device
from medha_worker.kernels.fast_forms import FORMS, MOST_ERROR, error_of, names_of_gpu, on_device
from medha_worker.kernels.name_table import choose_kernels, torch_kernels
from medha_worker.kernels.protocol import Kernels, KernelSizes
from medha_worker.kernels.quantised_rows import FastRows, QuantisedRows
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.kernels.torch_products import TorchProducts
from medha_worker.model.decode_graphs import captured_sizes
from medha_worker.model.host_blocks import HostBlocks
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.kv_scales import FP8, LayerScales
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.prepared_step import PreparedStep
from medha_worker.model.quantised_weights import LinearProducts, QuantisedWeight
from medha_worker.model.sampler import NotSampled, SequenceSampler
from medha_worker.model.tensor_group import Alone
from medha_worker.model.token_sampler import TokenSampler
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import Shard
from medha_worker.nvml import open_probe

BLOCK_TOKENS = 64
TARGET_SECONDS = 0.05  # of a step, for adaptive chunks
STATIC_CHUNKS = (128, 512, 2048, 8192)
PART_SECONDS = 150
COMPILE_SECONDS = 420  # of parts in which FlashInfer or vLLM compile the kernels that nobody has compiled yet
_VLLM_SECONDS = COMPILE_SECONDS - 60  # the rest is for our own engine
_STEPS = 20  # decode steps, one after the other
_ABORT_SECONDS = 5.0
QUANTISED_EXPERTS = (
    ("gpt_oss", "mxfp4"),
    ("qwen3_moe", "fp8-block"),
    ("qwen3_moe", "w4a16"),
    ("mixtral", "awq"),
)
_CHECKED_TOKENS, _WINDOW_TOKENS = 200, 64  # of a small model
_PRODUCT_ROWS = (1, 16, 64, 256, 2048)  # of activations, for products with quantised weights
_WINDOWED = ("gemma3_text", "gpt_oss", "mistral")  # the others' decodes are captured
RunStep = Callable[[PreparedStep], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a run: the model's shape and layers, the contexts in tokens, and the batches in sequences."""

    shape: LlamaShape
    layers: int
    contexts: tuple[int, ...]
    chunks: tuple[int, ...]
    decodes: tuple[tuple[int, int], ...]  # sequences, context
    peer_decode: tuple[int, int]  # sequences, context
    largest_chunk: int
    repeats: int


FULL = Sizes(
    shape=LLAMA3_8B,
    layers=4,
    contexts=(8_192, 32_768, 131_072, 262_144, 524_288),
    chunks=(32, 128, 512, 2048, 8192),
    decodes=((1, 131_072), (1, 900_000), (4, 131_072), (16, 8_192), (64, 8_192), (256, 1_024)),
    peer_decode=(16, 4_096),
    largest_chunk=8_192,
    repeats=5,
)
QUICK = Sizes(
    shape=SMALL,
    layers=2,
    contexts=(256, 1024),
    chunks=(32, 128),
    decodes=((1, 1024), (4, 256)),
    peer_decode=(4, 128),
    largest_chunk=128,
    repeats=2,
)


@dataclass(frozen=True, slots=True)
class Place:
    """The device on which a part runs, the sizes that it computes, and an interpreter that has vLLM, if one is named."""

    device: Device
    sizes: Sizes
    vllm_python: Path | None = None

    @property
    def kernel_sizes(self) -> KernelSizes:
        shape = self.sizes.shape
        return KernelSizes(
            shape.query_heads, shape.kv_heads, shape.head_dim, shape.hidden, shape.intermediate
        )

    def kernels(self) -> Kernels:
        return choose_kernels(self.kernel_sizes, self.device)

    def model(self, layers: int | None = None) -> Transformer:
        torch.manual_seed(0)
        return random_model(self.sizes.shape, layers or self.sizes.layers, self.device, self.kernels())

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the median time of `run` on the device, after one run that is not counted."""
        taken = []
        for _ in range(self.sizes.repeats + 1):
            self.device.synchronise()
            started = time.perf_counter()
            run()
            self.device.synchronise()
            taken.append(time.perf_counter() - started)
        return statistics.median(taken[1:])


def place_of(quick: bool, vllm_python: Path | None = None) -> Place:
    """Return the GPU, or with `quick` the CPU if there is none.

    Raises:
        SystemExit: there is no GPU, and results of a CPU would prove nothing.
    """
    if torch.cuda.is_available():
        from medha_worker.cuda_device import cuda_device

        return Place(cuda_device(0, torch.bfloat16), QUICK if quick else FULL, vllm_python)
    if not quick:
        sys.exit(
            "torch sees no GPU here, so nothing can be proved; --quick shows on the CPU that the script works"
        )
    return Place(host_device(torch.float32), QUICK, vllm_python)


# --- parts --------------------------------------------------------------------------------------------


def facts(place: Place) -> Row:
    found: Row = {
        "device": str(place.device),
        "python": platform.python_version(),
        "kernels": place.kernels().name,
    }
    for package in ("torch", "triton", "flashinfer-python", "transformers", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    if not place.device.is_host:
        properties = torch.cuda.get_device_properties(place.device.torch_device)
        found["name"] = properties.name
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["memory_gigabytes"] = round(properties.total_memory / 1e9, 1)
        found["multiprocessors"] = properties.multi_processor_count
        found["cuda"] = torch.version.cuda
        found["uuid"] = place.device.uuid
        probe = open_probe(place.device.uuid)
        found["nvml"] = None if probe is None else asdict(probe.figures())
        found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found


def numerics(place: Place) -> Row:
    errors = _attention_errors(place, place.kernels(), place.device.dtype)
    return {"attention": errors, **_model_errors(place)}


def _attention_errors(place: Place, ours: Kernels, pool_dtype: torch.dtype) -> list[Row]:
    """Return the errors of our kernels and of plain torch for each kind of span, against float64 over the same pool."""
    device, shape = place.device, place.sizes.shape
    order = np.random.default_rng(1).permutation(400)
    kinds = {
        "decode": [SequenceSpan(0, 1, 3000, order[:60]), SequenceSpan(1, 1, 17, order[60:61])],
        "chunk": [SequenceSpan(0, 300, 2000, order[:60])],
        "context only": [SequenceSpan(0, 70, 2000, order[:60], is_causal=False)],
        "stride 2": [SequenceSpan(0, 70, 2000, order[:60], stride=2)],
        "mixed": [
            SequenceSpan(0, 1, 900, order[:20]), SequenceSpan(1, 100, 0, order[20:30]), SequenceSpan(101, 1, 5, order[40:41]),
        ],
    }  # fmt: skip
    torch.manual_seed(1)
    pools = torch.randn(2, shape.kv_heads, 400 * BLOCK_TOKENS, shape.head_dim).to(
        device.torch_device, pool_dtype
    )
    rows = []
    for name, spans in kinds.items():
        q = torch.randn(spans[-1].rows.stop, shape.query_heads, shape.head_dim).to(
            device.torch_device, device.dtype
        )
        wanted, wanted_sums = _exact(q, pools, spans)
        errors = {}
        for which, kernels in (("ours", ours), ("torch", torch_kernels(device))):
            output, sums = kernels.attention.plan(spans, BLOCK_TOKENS).attend(q, pools[0], pools[1])
            errors[which] = _rms(output.double().cpu() - wanted) / _rms(wanted)
            errors[f"{which} sums"] = float((sums.double().cpu() - wanted_sums).abs().max())
        rows.append({"kind": name, **{key: float(f"{value:.3g}") for key, value in errors.items()}})
    return rows


def _exact(
    q: torch.Tensor, pools: torch.Tensor, spans: Sequence[SequenceSpan]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention in float64 on the CPU, from the definition of spans."""
    q, pools = q.double().cpu(), pools.double().cpu()
    output, sums = torch.zeros_like(q), torch.zeros(q.shape[:2], dtype=torch.float64)
    group = q.shape[1] // pools.shape[1]
    for span in spans:
        slots = np.concatenate([np.arange(b * BLOCK_TOKENS, (b + 1) * BLOCK_TOKENS) for b in span.blocks])
        slots = slots[: span.total_length]
        keys, values = (pool[:, slots].repeat_interleave(group, 0) for pool in pools)
        scores = torch.einsum("rhd,hkd->hrk", q[span.rows], keys) / math.sqrt(q.shape[2])
        if span.is_causal:
            last = span.context_length + span.stride * torch.arange(span.row_count)
            scores.masked_fill_(torch.arange(len(slots))[None, :] > last[:, None], -math.inf)
        output[span.rows] = torch.einsum("hrk,hkd->rhd", scores.softmax(-1), values)
        sums[span.rows] = scores.logsumexp(-1).T
    return output, sums


def _model_errors(place: Place) -> Row:
    """Compare logits with `transformers`: ours in chunks and decodes, theirs in one pass, both against float32."""
    sizes, device = place.sizes, place.device
    model = place.model()
    tokens = min(2048, sizes.contexts[-1])
    ids = torch.randint(7, sizes.shape.vocab, (tokens,), generator=torch.Generator().manual_seed(2))
    theirs = _of_transformers(model, place)
    with torch.inference_mode():
        rounded = theirs(ids[None].to(device.torch_device)).logits[0].float()
        exact = theirs.float()(ids[None].to(device.torch_device)).logits[0]
    del theirs
    ours = _logits_in_steps(model, ids, sizes.largest_chunk)
    scale = _rms(exact)
    return {
        "tokens": tokens,
        "transformers_error": round(_rms(rounded - exact) / scale, 6),
        "error": round(_rms(ours - exact) / scale, 6),
        "same_argmax_as_float32": round(float((ours.argmax(-1) == exact.argmax(-1)).float().mean()), 5),
        "transformers_same_argmax": round(float((rounded.argmax(-1) == exact.argmax(-1)).float().mean()), 5),
    }


def _logits_in_steps(model: Transformer, ids: torch.Tensor, largest: int) -> torch.Tensor:
    """Return the logits of all tokens, computed in chunks of at most `largest` and at last eight decodes."""
    tokens = len(ids)
    cache = model.new_kv_cache(-(-tokens // BLOCK_TOKENS), BLOCK_TOKENS)
    blocks = np.random.default_rng(3).permutation(cache.num_blocks)
    model.capture_decodes(cache, [1])
    logits, done = [], 0
    for count in (*_chunks(tokens - 8, largest), *(1,) * 8):
        span = SequenceSpan(0, count, done, blocks)
        hidden = model.forward(
            ids[done : done + count], model.prepare(torch.arange(done, done + count), [span], cache)
        )
        found = model.logits(hidden)
        assert found is not None
        logits.append(found)
        done += count
    model.forget_captured()
    return torch.cat(logits)


def families(place: Place) -> Row:
    return {"models": [_checkpoint_errors(place, name, "none") for name in ARCHITECTURES]}


def quantised(place: Place) -> Row:
    forms = [*(("llama", name) for name in QUANTISATIONS), *QUANTISED_EXPERTS]
    return {
        "models": [_checkpoint_errors(place, *form) for form in forms],
        "products": [row for name in FORMS for row in _products_of_form(place, name)],
    }


def _products_of_form(place: Place, name: str) -> list[Row]:
    """Compare the product of a form of weights with those of its numbers, which are made for each product, or kept.

    The weight is that of gate and up of an MLP, too large for a GPU's cache. Products are captured, as those of decodes are.
    """
    device, shape, form = place.device, place.sizes.shape, FORMS[name]
    found: Row = {"form": name, "is_right": False}
    if not device.is_host:
        capability = torch.cuda.get_device_capability(device.torch_device)
        if name not in names_of_gpu(capability, device.dtype):
            return [found | {"skipped": "this GPU has no such product"}]
    try:
        error = error_of(form, device)
        found |= {"is_right": error <= MOST_ERROR, "error_when_tried": float(f"{error:.3g}")}
        stored = on_device(
            form.example(torch.Generator().manual_seed(1), 2 * shape.intermediate, shape.hidden), device
        )
        counts = _PRODUCT_ROWS if place.sizes is FULL else _PRODUCT_ROWS[:2]
        rows = [_times_of_products(place, form.of(stored), stored, count) for count in counts]
    except Exception as failure:  # noqa: BLE001 - of an operator that this version, or a CPU, does not have
        return [found | {"failed": f"{type(failure).__name__}: {failure}"[-300:]}]
    return [found | row for row in rows]


def _repeat(run: Callable[[], object], times: int) -> None:
    for _ in range(times):
        run()


def _times_of_products(place: Place, fast: FastRows, stored: QuantisedRows, rows: int) -> Row:
    device = place.device
    torch.manual_seed(2)
    x = device.place(torch.randn(rows, stored.columns).to(device.dtype))
    products = LinearProducts(TorchProducts(), Alone(), 0, 1)
    largest = x.abs().amax(dim=1, keepdim=True)
    as_stored = QuantisedWeight([stored])
    kept = stored.numbers(slice(0, stored.rows), device.dtype).t()
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "fast": lambda: fast.product(x, largest),
        "numbers": lambda: products.product(x, as_stored),
        "kept": lambda: torch.mm(x, kept),
    }
    found, wanted = ways["fast"]().double(), ways["numbers"]().double()
    row: Row = {
        "rows": rows,
        "is_served": fast.takes(rows),
        "error": float(f"{_rms(found - wanted) / _rms(wanted):.3g}"),
    }
    for way, run in ways.items():
        replays = partial(_repeat, device.runtime.capture(partial(_repeat, run, 1)), _STEPS)
        row[f"{way}_seconds"] = place.seconds(replays) / _STEPS
    return row


def _checkpoint_errors(place: Place, architecture: str, quantisation: str) -> Row:
    """Compare a small model with the same one in float32 on the CPU; what fails does not keep others from running."""
    found: Row = {"architecture": architecture, "quantisation": quantisation}
    try:
        return found | _small_model_errors(place, architecture, quantisation)
    except Exception as error:  # noqa: BLE001 - of a kernel, a compiler or a driver
        return found | {"failed": f"{type(error).__name__}: {error}"[-300:]}


def _small_model_errors(place: Place, architecture: str, quantisation: str) -> Row:
    preset = "small" if place.sizes is FULL else "tiny"
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "model")
        init_checkpoint(
            directory, preset=preset, seed=0, architecture=architecture, dtype="bfloat16", quantisation=quantisation,
            window_tokens=_WINDOW_TOKENS if architecture in _WINDOWED else None,
        )  # fmt: skip
        kv_dtype: KvDtype = "fp8" if quantisation == "fp8-kv" else "auto"
        config = ModelConfig.from_directory(directory, kv_dtype=kv_dtype)
        shard = Shard.whole(config)

        def logits(device: Device, kernels: Kernels) -> torch.Tensor:
            model = Transformer.load(directory, config, shard, device=device, kernels=kernels)
            ids = torch.randint(
                7, config.vocab_size, (_CHECKED_TOKENS,), generator=torch.Generator().manual_seed(2)
            )
            return _logits_in_steps(model, ids, _CHECKED_TOKENS).cpu()

        exact, rounded = (
            logits(device, torch_kernels(device))
            for device in (host_device(torch.float32), host_device(torch.bfloat16))
        )
        kernels = choose_kernels(shard.kernel_sizes(config), place.device)
        ours = logits(place.device, kernels)
    errors = [_row_error(found, exact) for found in (ours, rounded)]
    return dict(zip(("error", "cpu_error"), errors, strict=True)) | {"kernels": kernels.name}


def _row_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the median error of a row: rounding may send single tokens through another expert."""
    sizes = exact.double().pow(2).mean(-1).sqrt()
    errors = (found.double() - exact.double()).pow(2).mean(-1).sqrt() / sizes
    return float(f"{float(errors.median()):.3g}")


def _chunks(tokens: int, largest: int) -> list[int]:
    """Return the sizes of a prefill's chunks: uneven ones, and the rest."""
    sizes, left = [], tokens
    for size in (1, 33, 256, 500):
        if size < min(left, largest):
            sizes.append(size)
            left -= size
    while left:
        sizes.append(min(left, largest))
        left -= sizes[-1]
    return sizes


def _of_transformers(model: Transformer, place: Place) -> Any:
    """Return the model of `transformers` with our weights, which computes attention by torch's fused kernels."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes, device = place.sizes, place.device
    fields = {
        key: value
        for key, value in config_fields(sizes.shape, sizes.layers).items()
        if key != "architectures"
    }
    with device.torch_device:  # it draws weights first, which takes a CPU long
        theirs = LlamaForCausalLM(LlamaConfig(**fields, attn_implementation="sdpa"))
    # A checkpoint that is loaded in 16 bits keeps its frequencies in float32; a cast of the whole model would round them.
    frequencies = theirs.model.rotary_emb.inv_freq.clone()
    theirs = theirs.to(device.torch_device, device.dtype).eval()
    theirs.model.rotary_emb.inv_freq = frequencies.to(device.torch_device)
    theirs.load_state_dict(_state(model), strict=True)
    return theirs


def _state(model: Transformer) -> dict[str, torch.Tensor]:
    """Return our weights under the names of `transformers`."""
    weights, config = model._weights, model.config
    q, kv = config.num_query_heads * config.head_dim, config.num_kv_heads * config.head_dim
    assert weights.embedding is not None
    assert weights.final_norm is not None
    assert weights.head is not None
    state = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.final_norm,
        "lm_head.weight": weights.head.T,
    }
    for index, layer in enumerate(weights.layers):
        queries, keys, values = layer.qkv.T.split((q, kv, kv))
        gate, up = layer.gate_up.T.chunk(2)
        named = {
            "input_layernorm": layer.input_norm, "post_attention_layernorm": layer.post_norm, "self_attn.q_proj": queries,
            "self_attn.k_proj": keys, "self_attn.v_proj": values, "self_attn.o_proj": layer.output.T,
            "mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": layer.down.T,
        }  # fmt: skip
        state |= {f"model.layers.{index}.{name}.weight": tensor for name, tensor in named.items()}
    return state


def sampling(place: Place) -> Row:
    """Sample from the same logits on the device and on the CPU, with every option alone and some together."""
    vocab = place.sizes.shape.vocab
    options = [
        Sampling(temperature=0.0), Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=40),
        Sampling(temperature=1.0, top_p=0.9), Sampling(temperature=1.3, min_p=0.05),
        Sampling(temperature=0.8, top_k=50, top_p=0.95, min_p=0.01),
        Sampling(temperature=1.0, repetition_penalty=1.2), Sampling(temperature=1.0, presence_penalty=0.5, logprobs=3),
        Sampling(temperature=1.0, logit_bias={5: 3.0}, logprobs=0),
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(4)
    on_device = TokenSampler(place.kernels().race, place.device)
    host = host_device(torch.float32)
    on_host = TokenSampler(torch_kernels(host).race, host)
    rows, differ = 0, 0
    for seed in range(4 * place.sizes.repeats):
        logits = 4.0 * torch.randn(len(options), vocab, generator=generator)
        prompt = np.arange(10, 30, dtype=np.int32)

        def samplers(seed: int = seed, prompt: Any = prompt) -> list[SequenceSampler]:
            return [
                SequenceSampler(
                    option,
                    seed=seed,
                    sample_index=index,
                    tokens=prompt,
                    prompt_length=len(prompt),
                    vocab_size=vocab,
                )
                for index, option in enumerate(options)
            ]

        here = on_device.sample(place.device.place(logits), samplers())
        there = on_host.sample(logits, samplers())
        for ours, theirs in zip(here, there, strict=True):
            assert not isinstance(ours, NotSampled)
            assert not isinstance(theirs, NotSampled)
            rows += 1
            differ += ours.token != theirs.token
    return {"samples": rows, "differ": differ}


def graphs(place: Place) -> Row:
    """Compare captured decodes with eager ones while lengths grow and the next step is prepared ahead."""
    sizes, device = place.sizes, place.device
    model, rows = place.model(), 7
    caches = [_filled(model, 40 * rows) for _ in range(2)]
    before = device.memory.used_bytes()
    model.capture_decodes(caches[0], captured_sizes(8))
    captured = max(0, device.memory.used_bytes() - before)
    worst, replays = 0.0, 0
    blocks = np.random.default_rng(5).permutation(caches[0].num_blocks)

    def step(turn: int) -> tuple[torch.Tensor, torch.Tensor, list[SequenceSpan]]:
        lengths = [30 * row * BLOCK_TOKENS // rows + turn for row in range(1, rows + 1)]
        spans = [
            SequenceSpan(row, 1, length, blocks[40 * row : 40 * row + 40])
            for row, length in enumerate(lengths)
        ]
        return torch.arange(10, 10 + rows) + turn, torch.tensor(lengths), spans

    ahead = model.prepare(*step(0)[1:], caches[0])
    for turn in range(6):
        prepared, (tokens, positions, spans) = ahead, step(turn)
        found = model.forward(tokens, prepared).clone()
        ahead = model.prepare(*step(turn + 1)[1:], caches[0])
        replays += prepared.captured is not None
        wanted = model.forward(tokens, model.prepare(positions, spans, caches[1]))
        worst = max(worst, _rms(found.float() - wanted.float()) / _rms(wanted.float()))
    return {"replays": replays, "error": float(f"{worst:.3g}"), "captured_megabytes": round(captured / 1e6, 1),
            "sizes": len(captured_sizes(8)), "layers": sizes.layers}  # fmt: skip


def determinism(place: Place) -> Row:
    """Return what batch-invariant kernels cost, or why this device refuses them: they are checked when they are chosen."""
    try:
        invariant = choose_kernels(place.kernel_sizes, place.device, "batchInvariant")
    except ConfigInvalid as error:
        return {"refused": str(error)}
    fast = place.model()
    context, rows = place.sizes.contexts[0], []
    chunk, most = place.sizes.chunks[-1], 8
    cache = _filled(fast, most * -(-(context + chunk) // BLOCK_TOKENS))
    for works in ([(context, chunk)], [(context, 1)], [(context, 1)] * most):
        best, same = (
            place.seconds(_step(model, cache, works)) for model in (fast, fast.with_kernels(invariant))
        )
        rows.append({"sequences": len(works), "rows": sum(count for _, count in works), "context": context,
                     "seconds": round(best, 6), "invariant_seconds": round(same, 6)})  # fmt: skip
    return {"layers": place.sizes.layers, "steps": rows}


def ceilings(place: Place) -> Row:
    size = 8192 if place.sizes is FULL else 256
    left, right = (
        torch.randn(size, size, device=place.device.torch_device, dtype=place.device.dtype) for _ in range(2)
    )
    product = place.seconds(lambda: left @ right)
    much = torch.empty((4 if place.sizes is FULL else 1) << (30 if place.sizes is FULL else 24), dtype=torch.uint8,
                       device=place.device.torch_device)  # fmt: skip
    half = len(much) // 2
    copy = place.seconds(lambda: much[:half].copy_(much[half:]))
    runtime = place.device.runtime
    before, _, after = runtime.timed_mark(), left @ right, runtime.timed_mark()
    place.device.synchronise()
    marked = None if before is None or after is None else before.seconds_until(after)
    return {
        "marked_over_waited": None if marked is None else round(marked / product, 3),
        "teraflops": round(2 * size**3 / product / 1e12, 2),
        "gigabytes_per_second": round(len(much) / copy / 1e9, 1),
    }


def prefill(place: Place) -> Row:
    """Measure the last chunk behind each context, and sum up what a whole causal prefill takes."""
    sizes = place.sizes
    model = place.model()
    cache = _filled(model, -(-(sizes.contexts[-1] + sizes.largest_chunk) // BLOCK_TOKENS))
    chunk = sizes.largest_chunk
    rows = []
    for context in sizes.contexts:
        behind = context - chunk if context > chunk else 0
        taken = place.seconds(_step(model, cache, [(behind, chunk)]))
        flops = _flops(model, behind, chunk)
        rows.append(
            {
                "context": context,
                "seconds": round(taken, 5),
                "teraflops_per_second": round(flops / taken / 1e12, 2),
            }
        )
    return {"chunk": chunk, "layers": sizes.layers, "last_chunks": rows}


def decode(place: Place) -> Row:
    sizes, rows = place.sizes, []
    model = place.model(_decoding_layers(place))
    for sequences, context in sizes.decodes:
        cache = _filled(model, sequences * (-(-(context + 8) // BLOCK_TOKENS)))
        model.forget_captured()
        model.capture_decodes(cache, [sequences])
        taken = _decode_seconds(model, cache, [(context, 1)] * sequences, place)
        moved = (
            model.weights_bytes
            - 2 * model.config.vocab_size * model.config.hidden_size * model.dtype.itemsize
        )
        moved += sequences * (context + 1) * _kv_bytes(model)
        rows.append({"sequences": sequences, "context": context, "seconds": round(taken, 6),
                     "gigabytes_per_second": round(moved / taken / 1e9, 1), "captured": model.captures})  # fmt: skip
        del cache
    return {"layers": model.config.num_layers, "steps": rows}


def chunks(place: Place) -> Row:
    """Measure chunks behind contexts alone, and beside 16 decodes, and derive whole prefills from them."""
    sizes = place.sizes
    model = place.model()
    contexts = [0, *sizes.contexts]
    beside = [(min(4096, sizes.contexts[-1]), 1)] * (16 if sizes is FULL else 2)
    blocks = -(-(sizes.contexts[-1] + sizes.largest_chunk) // BLOCK_TOKENS) + sum(
        -(-c // BLOCK_TOKENS) + 1 for c, _ in beside
    )
    cache = _filled(model, blocks)
    alone = [
        {
            "context": context,
            "chunk": chunk,
            "seconds": place.seconds(_step(model, cache, [(context, chunk)])),
        }
        for context in (contexts[-1],)
        for chunk in sizes.chunks
    ]
    mixed = [
        {
            "context": context,
            "chunk": chunk,
            "seconds": place.seconds(_step(model, cache, [*beside, (context, chunk)])),
        }
        for context in contexts
        for chunk in sizes.chunks
    ]
    scale = sizes.shape.layers / sizes.layers  # a whole model's layers
    return {"alone": alone, "mixed": mixed, "prefills": prefills(mixed, contexts[-1], scale),
            "attention": _attention_overhead(model, cache, place)}  # fmt: skip


def _attention_overhead(model: Transformer, cache: KVCache, place: Place) -> Row:
    """Return the seconds of attention for each token, in the smallest and in the largest chunk, behind the longest context."""
    context, found = place.sizes.contexts[-1], {}
    shape = place.sizes.shape
    for chunk in (place.sizes.chunks[0], place.sizes.chunks[-1]):
        q = torch.randn(chunk, shape.query_heads, shape.head_dim).to(
            place.device.torch_device, place.device.dtype
        )
        blocks = np.arange(-(-(context + chunk) // BLOCK_TOKENS))
        plan = model.kernels.attention.plan([SequenceSpan(0, chunk, context, blocks)], cache.block_tokens)
        taken = place.seconds(lambda plan=plan, q=q: plan.attend(q, cache.keys[0], cache.values[0]))
        found[f"chunk of {chunk}"] = taken / chunk
    small, large = found.values()
    return {**found, "overhead": round(small / large - 1, 4)}


def prefills(mixed: Sequence[Row], tokens: int, scale: float) -> list[Row]:
    """Return the seconds of a prefill of `tokens`, and its longest step, for static chunks and for adaptive ones.

    Times between the measured contexts are interpolated. An adaptive chunk is the largest measured one whose step stays
    within the target.
    """
    sizes = sorted({row["chunk"] for row in mixed})
    curves = {
        size: ([row["context"] for row in mixed if row["chunk"] == size],
               [scale * row["seconds"] for row in mixed if row["chunk"] == size])
        for size in sizes
    }  # fmt: skip

    def step_seconds(context: int, size: int) -> float:
        return float(np.interp(context, *curves[size]))

    def whole(choose: Callable[[int], int]) -> tuple[float, float]:
        total, longest, done = 0.0, 0.0, 0
        while done < tokens:
            size = choose(done)
            taken = step_seconds(done, size)
            total, longest, done = total + taken, max(longest, taken), done + size
        return round(total, 3), round(longest, 4)

    def adaptive(context: int) -> int:
        fitting = [size for size in sizes if step_seconds(context, size) <= TARGET_SECONDS]
        return fitting[-1] if fitting else sizes[0]

    chosen: dict[str, Callable[[int], int]] = {f"static {size}": lambda _, size=size: size for size in sizes}
    chosen["adaptive"] = adaptive
    return [
        dict(zip(("chunks", "seconds", "longest_step"), (name, *whole(choose)), strict=True))
        for name, choose in chosen.items()
    ]


def overhead(place: Place) -> Row:
    """Measure decode steps as a rank runs them, the next one prepared beside each, and the kernels' own time in them."""
    model = place.model(_decoding_layers(place))
    sequences, context = place.sizes.decodes[-1]
    cache = _filled(model, sequences * (-(-(context + 8) // BLOCK_TOKENS)))
    found: Row = {"sequences": sequences, "context": context, "layers": model.config.num_layers}
    for name in ("eager", "captured"):
        if name == "captured":
            model.capture_decodes(cache, [sequences])
        works = [(context, 1)] * sequences
        found[f"{name}_seconds"] = _decode_seconds(model, cache, works, place)
        found[f"{name}_busy_seconds"] = _busy_seconds(_decodes(model, cache, works, place), place) / _STEPS
        step = _step(model, cache, works)
        found[f"{name}_alone_seconds"] = place.seconds(step)  # with the time in which it is prepared
    return found


def _busy_seconds(run: Callable[[], None], place: Place) -> float:
    """Return the time that the device's kernels take in a run."""
    if place.device.is_host:
        return place.seconds(run)
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
    return sum(event.self_device_time_total for event in profiled.key_averages()) / 1e6


def fp8_kv(place: Place) -> Row:
    """Return the errors of attention over FP8, the values that are rounded as no CPU does, and what decodes gain."""
    device, sizes = place.device, place.sizes
    kernels = choose_kernels(replace(place.kernel_sizes, has_fp8_kv=True), device)
    numbers = (100 * torch.randn(1 << 20, generator=torch.Generator().manual_seed(6))).clamp_(-448, 448)
    rounded = [x.to(FP8).cpu().view(torch.uint8) for x in (numbers, numbers.to(device.torch_device))]
    plain = place.model(_decoding_layers(place))
    one = torch.ones(plain.shard.kv_heads(plain.config), 1, device=device.torch_device)
    scaled = Transformer(
        replace(plain.config, kv_dtype="fp8"), plain.shard,
        replace(plain._weights, kv_scales=[LayerScales(one, one)] * plain.config.num_layers), kernels=kernels,
    )  # fmt: skip
    rows = []
    for sequences, context in sizes.decodes:
        row: Row = {"sequences": sequences, "context": context}
        for name, model in (("seconds", plain), ("fp8_seconds", scaled)):
            cache = _filled(model, sequences * (-(-(context + 8) // BLOCK_TOKENS)))
            model.capture_decodes(cache, [sequences])
            row[name] = round(_decode_seconds(model, cache, [(context, 1)] * sequences, place), 6)
            model.forget_captured()
            del cache
        rows.append(row)
    return {"kernels": kernels.name, "layers": plain.config.num_layers, "rounded_otherwise": int((rounded[0] != rounded[1]).sum()),
            "attention": _attention_errors(place, kernels, FP8), "steps": rows}  # fmt: skip


def tiers(place: Place) -> Row:
    """Send blocks of a pool to host memory and fetch them to other blocks, and measure both."""
    model, half = place.model(), 64 if place.sizes is FULL else 8
    cache = _filled(model, 2 * half)
    host = HostBlocks(cache, half)
    wanted = [pool[:, : half * BLOCK_TOKENS].clone() for pool in cache.pools()]
    host.copy([TierCopy(False, 0, 0, half)])
    for pool in cache.pools():  # behind the copies, in the order of the stream
        pool[:, : half * BLOCK_TOKENS].zero_()
    host.copy([TierCopy(True, half, 0, half)])
    found = [pool[:, half * BLOCK_TOKENS : 2 * half * BLOCK_TOKENS] for pool in cache.pools()]
    differ = sum(not torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
    seconds = host.seconds_per_block(time.perf_counter)
    fetched, offloaded = (round(host.block_bytes / taken / 1e9, 2) for taken in seconds)
    return {"blocks": half, "pools": len(wanted), "differ": differ,
            "fetched_gigabytes_per_second": fetched, "offloaded_gigabytes_per_second": offloaded}  # fmt: skip


def peers(place: Place) -> Row:
    """Measure a whole prefill and decode steps beside those of `transformers`, for the same weights, lengths and batch."""
    from transformers import DynamicCache

    sizes, device = place.sizes, place.device
    model = place.model()
    theirs = _of_transformers(model, place)
    (sequences, context), prompt = sizes.peer_decode, sizes.contexts[0]
    found = _own_seconds(model, place)
    ids = torch.arange(sequences * context).remainder(sizes.shape.vocab).to(device.torch_device)
    found["transformers_prefill_seconds"] = place.seconds(
        lambda: theirs(ids[None, :prompt], use_cache=False, logits_to_keep=1)
    )
    kept = DynamicCache()
    theirs(ids.view(sequences, context), past_key_values=kept, logits_to_keep=1)
    last = ids[:sequences, None]
    # Each run leaves a token in their cache, where thousands are.
    found["transformers_decode_seconds"] = place.seconds(
        lambda: theirs(last, past_key_values=kept, logits_to_keep=1)
    )
    return found


def _own_seconds(model: Transformer, place: Place) -> Row:
    """Measure a whole prefill and a decode step, each with the output head and the choice of the best tokens."""
    sizes = place.sizes
    (sequences, context), prompt = sizes.peer_decode, sizes.contexts[0]
    blocks = -(-max(prompt, sequences * (context + BLOCK_TOKENS)) // BLOCK_TOKENS)
    cache = _filled(model, blocks)

    def best(rows: torch.Tensor) -> torch.Tensor:
        logits = model.logits(rows)
        assert logits is not None
        return logits.argmax(-1)

    *chunks, last_chunk = [
        _step(model, cache, [(done, min(sizes.largest_chunk, prompt - done))])
        for done in range(0, prompt, sizes.largest_chunk)
    ]
    found: Row = {"prompt": prompt, "sequences": sequences, "context": context, "layers": sizes.layers}
    found["prefill_seconds"] = place.seconds(lambda: ([chunk() for chunk in chunks], best(last_chunk()[-1:])))
    model.capture_decodes(cache, [sequences])
    decodes = _step(model, cache, [(context, 1)] * sequences)
    found["decode_seconds"] = place.seconds(lambda: best(decodes()))
    model.forget_captured()
    return found


def vllm(place: Place) -> Row:
    """Measure what `peers` does beside vLLM's engine, which runs in a process of its own before ours takes memory."""
    python = place.vllm_python
    if python is None:
        if importlib.util.find_spec("vllm") is None:
            return {"skipped": "this interpreter has no vLLM; install vLLM into an environment, and name its interpreter: "
                               "--vllm-python PYTHON, or make gpu-check GPU_VLLM_PYTHON=PYTHON"}  # fmt: skip
        python = Path(sys.executable)
    sizes, (sequences, context) = place.sizes, place.sizes.peer_decode
    order = {
        "config": config_fields(sizes.shape, sizes.layers), "dtype": str(place.device.dtype).removeprefix("torch."),
        "device": place.device.torch_device.type, "prompt": sizes.contexts[0], "sequences": sequences, "context": context,
        "largest_chunk": sizes.largest_chunk, "repeats": sizes.repeats, "is_eager": place.device.is_host,
    }  # fmt: skip
    theirs = _of_vllm(python, order)
    if "skipped" in theirs:
        return theirs
    return {**_own_seconds(place.model(), place), **{f"vllm_{name}": value for name, value in theirs.items()}}


def _of_vllm(python: Path, order: Row) -> Row:
    """Run `gpu_vllm.py` by an interpreter. The script ends with its input, so that it does not outlive this process.

    Raises:
        RuntimeError: it failed, or did not end in time.
    """
    is_other = python != Path(sys.executable)
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH" or not is_other}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        command = [str(python), str(Path(__file__).with_name("gpu_vllm.py"))]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=errors, text=True, env=kept
        ) as child:
            assert child.stdin is not None
            child.stdin.write(json.dumps(order) + "\n")
            child.stdin.flush()
            try:
                status: object = child.wait(_VLLM_SECONDS)
            except subprocess.TimeoutExpired:
                status = f"none within {_VLLM_SECONDS} s"
            child.kill()
        output.seek(0)
        errors.seek(0)
        if status == 0:
            found: Row = json.loads(output.read().splitlines()[-1])
            return found
        raise RuntimeError(f"vLLM in {python} failed, exit status {status}:\n{errors.read()[-1000:]}")


def nccl(place: Place) -> Row:
    """Return what NCCL does for one rank, in a group and with calls as those of a data plane."""
    if place.device.is_host:
        return {"skipped": "there is no GPU"}
    from torch.distributed import HashStore

    from medha_worker.rank.loss_guard import LossGuard
    from medha_worker.rank.nccl_plane import NcclPod, nccl_groups, restrain_torch

    device = place.device
    restrain_torch()
    group = nccl_groups(HashStore(), 0, device.torch_device)("pod 0", [0])
    pod = NcclPod(group, 0, LossGuard(0, {}))
    x = torch.ones(8, 4096, device=device.torch_device, dtype=device.dtype)
    captured = [device.runtime.capture(lambda: pod.all_reduce(x))]
    captured[0]()
    seconds, replay_seconds = place.seconds(lambda: pod.all_reduce(x)), place.seconds(captured[0])
    sent, received = (
        torch.arange(4096, device=device.torch_device),
        torch.zeros(4096, dtype=torch.int64, device=device.torch_device),
    )
    group._start_coalescing()
    group.recv([received], 0, 0)
    group.send([sent], 0, 0)
    group._end_coalescing().block_current_stream()
    found = {"sum": float(x.float().mean()), "seconds": seconds, "replay_seconds": replay_seconds,
             "exchanged": torch.equal(sent, received), "error": group.get_error().name}  # fmt: skip
    aborting = Thread(target=group.abort, daemon=True)
    aborting.start()
    aborting.join(_ABORT_SECONDS)
    found["abort_waits_for_captured"] = aborting.is_alive()
    captured.clear()
    aborting.join(_ABORT_SECONDS)
    return found | {"abort_ended": not aborting.is_alive()}


def races(place: Place) -> Row:
    tool = shutil.which("compute-sanitizer")
    if place.device.is_host or tool is None:
        return {"skipped": "there is no GPU" if place.device.is_host else "there is no compute-sanitizer"}
    found: Row = {}
    for check in ("memcheck", "racecheck"):
        command = [tool, "--tool", check, sys.executable, __file__, "--inside", "graphs", "--quick"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=PART_SECONDS / 2
            )
        except subprocess.TimeoutExpired:
            found[check] = "did not end in time"
        else:
            summary = [line for line in done.stdout.splitlines() if "SUMMARY" in line]
            found[check] = summary[-1].lstrip("= ") if summary else (done.stderr or done.stdout)[-300:]
    return found


PARTS: dict[str, Callable[[Place], Row]] = {
    part.__name__: part
    for part in (
        facts,
        numerics,
        families,
        quantised,
        determinism,
        sampling,
        graphs,
        ceilings,
        prefill,
        decode,
        chunks,
        overhead,
        fp8_kv,
        tiers,
        peers,
        vllm,
        nccl,
        races,
    )
}

# --- shared by the parts ------------------------------------------------------------------------------


def _decoding_layers(place: Place) -> int:
    """Return the layers of a model that decodes: twice as many, so that a step takes longer than the host needs to prepare one."""
    return 2 * place.sizes.layers


def _filled(model: Transformer, blocks: int) -> KVCache:
    """Return a pool of random keys and values, the same each time."""
    cache = model.new_kv_cache(blocks, BLOCK_TOKENS)
    for layer, pool in enumerate((*cache.keys, *cache.values)):
        torch.manual_seed(layer)
        # Torch has no random numbers of FP8.
        pool.copy_(torch.empty(pool.shape, dtype=model.dtype, device=pool.device).normal_())
    return cache


def _step(model: Transformer, cache: KVCache, works: Sequence[tuple[int, int]]) -> Callable[[], torch.Tensor]:
    """Return a function that prepares and runs one step of sequences of (context, tokens)."""
    prepare, run = _halves_of_step(model, cache, works)
    return lambda: run(prepare())


def _decodes(
    model: Transformer, cache: KVCache, works: Sequence[tuple[int, int]], place: Place
) -> Callable[[], None]:
    """Return a function that runs `_STEPS` steps as a rank does: the next one is prepared beside each."""
    prepare, run = _halves_of_step(model, cache, works)

    def many() -> None:
        ahead = prepare()
        for _ in range(_STEPS - 1):
            run(ahead)
            ahead = prepare()
            place.device.synchronise()
        run(ahead)
        place.device.synchronise()

    return many


def _decode_seconds(
    model: Transformer, cache: KVCache, works: Sequence[tuple[int, int]], place: Place
) -> float:
    return place.seconds(_decodes(model, cache, works, place)) / _STEPS


def _halves_of_step(
    model: Transformer, cache: KVCache, works: Sequence[tuple[int, int]]
) -> tuple[Callable[[], PreparedStep], RunStep]:
    """Return a function that prepares a step, and one that runs it."""
    spans, row, block = [], 0, 0
    for context, count in works:
        end = block + -(-(context + count) // BLOCK_TOKENS)
        spans.append(SequenceSpan(row, count, context, np.arange(block, end) % cache.num_blocks))
        row, block = row + count, end
    positions = torch.cat([torch.arange(context, context + count) for context, count in works])
    tokens = torch.arange(row) % model.config.vocab_size
    return lambda: model.prepare(positions, spans, cache), lambda prepared: model.forward(tokens, prepared)


def _flops(model: Transformer, context: int, count: int) -> float:
    """Return the FLOPs of the layers for a causal chunk; the output head is left out."""
    config = model.config
    head = 2.0 * config.vocab_size * config.hidden_size
    pairs = count * (context + (count + 1) / 2)
    return count * (config.linear_flops_per_token - head) + config.attention_flops_per_pair * pairs


def _kv_bytes(model: Transformer) -> int:
    config = model.config
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * model.dtype.itemsize


def _rms(x: torch.Tensor) -> float:
    return float(x.double().pow(2).mean().sqrt())


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


# --- claims -------------------------------------------------------------------------------------------


def claims_of(parts: dict[str, Row]) -> list[Row]:
    """Return the claims that the finished parts allow; on a CPU, those that do not depend on the device."""
    found = []
    if sampled := parts.get("sampling"):
        found.append(
            claim("samples that differ from the CPU's", sampled.get("differ", math.nan), "samples", 0)
        )
    if captured := parts.get("graphs"):
        found.append(
            claim(
                "difference of captured decodes from eager ones",
                captured.get("error", math.nan),
                "ratio",
                1e-2,
            )
        )
    if "differ" in (copied := parts.get("tiers") or {}):
        found.append(
            claim(
                "tensors of blocks that come back from host memory otherwise", copied["differ"], "tensors", 0
            )
        )
    if (parts.get("facts") or {}).get("device", "cpu") == "cpu":
        return found
    for part, what in (("families", "families"), ("quantised", "forms of quantised weights")):
        if models := (parts.get(part) or {}).get("models"):
            wrong = [row for row in models if "failed" in row or row["error"] > 2 * row["cpu_error"]]
            found.append(claim(f"{what} that fail, or whose error is more than twice that of bfloat16 on the CPU", len(wrong),
                               "models", 0))  # fmt: skip
    if products := (parts.get("quantised") or {}).get("products"):
        wrong = [row for row in products if "failed" in row or not (row["is_right"] or "skipped" in row)]
        found.append(
            claim(
                "products of quantised weights that this GPU has and that fail or are wrong",
                len(wrong),
                "products",
                0,
            )
        )
        found += [
            claim(f"time of {row['rows']} rows times weights in {row['form']}, over that of numbers made for it",
                  row["fast_seconds"] / row["numbers_seconds"], "ratio", 1.0)
            for row in products if row.get("is_served") and row["rows"] in (1, 16)
        ]  # fmt: skip
    if "steps" in (rounded := parts.get("fp8_kv") or {}):
        found.append(
            claim(
                "values that are rounded to FP8 otherwise than on the CPU",
                rounded["rounded_otherwise"],
                "values",
                0,
            )
        )
        worst = max(row["ours"] / max(row["torch"], 1e-9) for row in rounded["attention"])
        found.append(claim("error of attention over FP8 against float64, over that of plain torch", worst, "ratio", 2.0,
                           peer="torch"))  # fmt: skip
        found += [
            claim(f"time of {row['sequences']} decodes behind {row['context']:,} tokens of FP8, over that with 16 bits",
                  row["fp8_seconds"] / row["seconds"], "ratio", 0.8)
            for row in rounded["steps"] if row["context"] >= 131_072
        ]  # fmt: skip
    if invariance := parts.get("determinism"):
        found.append(claim("batch-invariant kernels refused", int("refused" in invariance), "kernels", 0))
    if (numbers := parts.get("numerics")) and "error" in numbers:
        found.append(
            claim(
                "error of logits against float32, over that of transformers in the same dtype",
                numbers["error"] / max(numbers["transformers_error"], 1e-9),
                "ratio",
                1.2,
                peer="transformers",
            )
        )
        worst = max(row["ours"] / max(row["torch"], 1e-9) for row in numbers["attention"])
        found.append(
            claim(
                "error of attention against float64, over that of plain torch",
                worst,
                "ratio",
                2.0,
                peer="torch",
            )
        )
    top = parts.get("ceilings") or {}
    if "teraflops" in top and (rows := (parts.get("prefill") or {}).get("last_chunks")):
        found += [
            claim(f"MFU of the last chunk of {row['context']:,} tokens", 100 * row["teraflops_per_second"] / top["teraflops"],
                  "% of the ceiling", 60, "more")
            for row in rows if row["context"] >= 131_072
        ]  # fmt: skip
    if "gigabytes_per_second" in top and (rows := (parts.get("decode") or {}).get("steps")):
        found += [
            claim(f"MBU of {row['sequences']} decodes behind {row['context']:,} tokens",
                  100 * row["gigabytes_per_second"] / top["gigabytes_per_second"], "% of the ceiling", 90, "more")
            for row in rows if row["context"] >= 131_072
        ]  # fmt: skip
    if (measured := parts.get("chunks")) and "prefills" in measured:
        found.append(
            claim(
                "attention of a token in the smallest chunk beyond that in the largest",
                100 * measured["attention"]["overhead"],
                "%",
                11,
            )
        )
        *static, adaptive = measured["prefills"]
        worse = [
            row
            for row in static
            if row["seconds"] < adaptive["seconds"] and row["longest_step"] <= adaptive["longest_step"]
        ]
        found.append(
            claim(
                "static chunks that are at least as fast as adaptive ones with no longer a step",
                len(worse),
                "sizes",
                0,
            )
        )
    if (measured := parts.get("overhead")) and "captured_seconds" in measured:
        whole, busy = measured["captured_seconds"], measured["captured_busy_seconds"]
        full = whole - busy + busy * FULL.shape.layers / measured["layers"]
        found.append(
            claim(
                "what the host adds to a captured decode step of a whole model",
                100 * (whole - busy) / full,
                "%",
                5,
            )
        )
    for part, peer in (("peers", "transformers"), ("vllm", "vllm")):
        if "decode_seconds" in (measured := parts.get(part) or {}):
            found += [
                claim(f"time of {what}, over that of {peer}", measured[f"{key}_seconds"] / measured[f"{peer}_{key}_seconds"],
                      "ratio", 1, peer=peer)
                for key, what in {"prefill": "a whole prefill", "decode": "a decode step"}.items()
            ]  # fmt: skip
    return found


# --- one command --------------------------------------------------------------------------------------


def main() -> int:
    options = parser(__doc__, quick="small sizes, and on the CPU if there is no GPU")
    options.add_argument(
        "--part", action="append", choices=list(PARTS), help="only this part; may be repeated"
    )
    options.add_argument(
        "--vllm-python",
        type=_interpreter,
        metavar="PYTHON",
        help="an interpreter that has vLLM (default this one)",
    )
    options.add_argument("--inside", choices=list(PARTS), help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.inside:
        with torch.inference_mode():
            found = PARTS[arguments.inside](place_of(arguments.quick, arguments.vllm_python))
            print(json.dumps(found))
        return 0
    place_of(arguments.quick)  # refuses before anything is begun
    results = _earlier(arguments.json)
    parts: dict[str, Row] = results["parts"]
    for name in arguments.part or PARTS:
        if name in parts and not ({"error_text", "skipped"} & parts[name].keys()) and not arguments.part:
            progress(f"{name}: done before")
            continue
        progress(f"{name} ...")
        started = time.monotonic()
        parts[name] = _run_part(name, quick=arguments.quick, vllm_python=arguments.vllm_python)
        said = parts[name].get("error_text") or parts[name].get("skipped") or ""
        progress(f"{name}: {time.monotonic() - started:.0f} s {said}")
        save(claims_of(parts), arguments.json, results)
    for name, found in parts.items():
        print(f"\n{name}")
        _show(found)
    failed = [name for name, found in parts.items() if "error_text" in found]
    for name in failed:
        print(f"\n{name} failed:\n{parts[name]['error_text']}")
    return report(claims_of(parts), arguments.json, results) or int(bool(failed))


def _earlier(target: Path | None) -> Row:
    """Return the results of the same sources, to which parts are added."""
    if target is not None and target.is_file():
        found: Row = json.loads(target.read_text(encoding="utf-8"))
        if found.get("sources") == sources():
            return {"sources": found["sources"], "parts": found["parts"]}
        progress(f"{target} is of other sources, and is replaced")
    return {"sources": sources(), "parts": {}}


def _interpreter(text: str) -> Path:
    if not (found := Path(text).absolute()).is_file():
        raise argparse.ArgumentTypeError(f"{text} is no file; name an interpreter that has vLLM")
    return found


def _run_part(name: str, *, quick: bool, vllm_python: Path | None) -> Row:
    compiles = PARTS[name] in (facts, families, quantised, fp8_kv, vllm)
    limit_seconds = COMPILE_SECONDS if compiles else PART_SECONDS
    command = [sys.executable, __file__, "--inside", name, *(["--quick"] if quick else [])]
    if vllm_python is not None:
        command += ["--vllm-python", str(vllm_python)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        return {"error_text": f"did not end within {limit_seconds} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"error_text": done.stderr[-1500:] or f"exit status {done.returncode}"}
    found: Row = json.loads(lines[-1])
    return found


def _show(found: Row) -> None:
    plain = {key: value for key, value in found.items() if not isinstance(value, list | dict)}
    if plain:
        table(plain, [plain.values()])
    for key, value in found.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            print(f"{key}:")
            columns = list(dict.fromkeys(name for row in value for name in row))
            table(columns, [[row.get(name, "") for name in columns] for row in value])
        elif isinstance(value, dict):
            print(f"{key}: {value}")


if __name__ == "__main__":
    exit_with(main)
