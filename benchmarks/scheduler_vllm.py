"""Time `schedule()` of vLLM's scheduler; `scheduler.py` runs this script in an interpreter that has vLLM.

The queue is that of `scheduler.py`, but longs have 20,000 tokens, because vLLM keeps every prompt's ids in the scheduler.
The script prints one JSON line.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import numpy as np
import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

QUEUES = (1, 100, 1_000, 10_000)
BLOCKS, BLOCK_TOKENS = 500_000, 16
WARM_UP = 20
LONGEST = 20_000
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 1000,
    "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "torch_dtype": "float32",
}  # fmt: skip


def new_scheduler() -> Scheduler:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(MODEL))
        model = ModelConfig(model=directory, skip_tokenizer_init=True, max_model_len=32_768, dtype="float32")
    scheduling = SchedulerConfig(
        max_model_len=32_768, is_encoder_decoder=False, max_num_batched_tokens=2048, max_num_seqs=512
    )
    cache = CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=False)
    cache.num_gpu_blocks = BLOCKS
    config = VllmConfig(
        model_config=model,
        scheduler_config=scheduling,
        cache_config=cache,
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig(device="cpu"),
    )
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=16, dtype=torch.float32)
    pool = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
    return Scheduler(config, pool, StructuredOutputManager(config), BLOCK_TOKENS)


def prompt_tokens(random: Random) -> int:
    if random.random() < 0.05:
        return LONGEST
    return min(max(int(random.lognormvariate(5.2, 1.2)), 4), 4096)


class Bench:
    def __init__(self) -> None:
        self.scheduler = new_scheduler()
        self.submitted = 0
        self.random = Random(7)

    def submit(self, tokens: int, output_tokens: int) -> None:
        self.submitted += 1
        sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        sampling.update_from_generation_config({}, 2)
        self.scheduler.add_request(Request(f"request-{self.submitted}", [7] * tokens, sampling, None))

    def advance(self) -> tuple[float, int]:
        """Schedule and complete a step; return the seconds of `schedule()`, and how many sequences decode in the step."""
        start = time.thread_time()
        output = self.scheduler.schedule()
        seconds = time.thread_time() - start
        ids = list(output.num_scheduled_tokens)
        sampled, decodes = [], 0
        for id_ in ids:
            request = self.scheduler.requests[id_]
            decodes += request.num_output_tokens > 0
            done = request.num_computed_tokens >= request.num_tokens
            sampled.append([7] if done else [])
        indices = {id_: index for index, id_ in enumerate(ids)}
        self.scheduler.update_from_output(output, ModelRunnerOutput(ids, indices, sampled))
        return seconds, decodes

    def measure(self, queue: int, decodes: int, launches: int) -> dict[str, Any]:
        for _ in range(decodes):
            self.submit(int(self.random.lognormvariate(5.2, 1.2)) % 2000 + 4, 4000)
        while self.scheduler.waiting:
            self.advance()
        timed: list[float] = []
        while len(timed) < launches + WARM_UP:
            while len(self.scheduler.waiting) < queue:
                self.submit(prompt_tokens(self.random), 1)
            timed.append(self.advance()[0] * 1e3)
        times = np.array(timed[WARM_UP:])
        return {
            "scheduler": f"vLLM {vllm.__version__}",
            "queued": queue,
            "decodes": decodes,
            "p50_ms": float(np.percentile(times, 50)),
            "p99_ms": float(np.percentile(times, 99)),
            "max_ms": float(times.max()),
        }


if __name__ == "__main__":
    wanted = int(sys.argv[1])
    print(json.dumps([Bench().measure(queue, decodes, wanted) for decodes in (0, 256) for queue in QUEUES]))
