"""Time a prefill and decode steps of vLLM's engine; `gpu.py` runs this script in an interpreter that has vLLM.

It reads one line of JSON, its order: the `config.json` of a model, whose weights vLLM makes up, and the sizes of `gpu.py`'s part
`peers`. It prints one line of JSON. When its input ends, so does it: it does not outlive the part that waits for it.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from threading import Thread
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process, which ends at once
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB, on a CPU
os.environ.setdefault("HF_HUB_OFFLINE", "1")

DECODES = 16  # steps that are timed together
BLOCK_TOKENS = 16


def end_with_input() -> None:
    sys.stdin.read()
    os._exit(1)


def measure(order: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of a prefill and of a decode step, each the median of its repeats.

    Sequences that are decoded have their KV in vLLM's prefix cache, so that a run of one token computes little more than its
    last block. What a longer run takes beyond that is the time of decode steps.
    """
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    if current_platform.device_type != order["device"]:
        return {"skipped": f"this vLLM is built for {current_platform.device_type}, and the engine runs on {order['device']}; "
                           f"install vLLM for {order['device']} in {sys.executable}"}  # fmt: skip
    sequences, context, prompt = order["sequences"], order["context"], order["prompt"]
    rows = max(prompt, context) + DECODES + BLOCK_TOKENS
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(order["config"]), encoding="utf-8")
        engine = LLM(
            model=folder, skip_tokenizer_init=True, load_format="dummy", dtype=order["dtype"], max_model_len=rows,
            max_num_batched_tokens=max(order["largest_chunk"], sequences), max_num_seqs=sequences,
            enable_prefix_caching=True, enforce_eager=order["is_eager"], seed=0,
            **({} if order["is_eager"] else {"gpu_memory_utilization": 0.6}),
        )  # fmt: skip
    started_seconds = time.perf_counter() - started
    vocab = order["config"]["vocab_size"]

    def seconds(prompts: list[list[int]], tokens: int) -> float:
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        found = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        taken = time.perf_counter() - begun  # the host has the tokens, so that the device has ended
        assert all(len(one.outputs[0].token_ids) == tokens for one in found)
        return taken

    def ids(count: int, first: int) -> list[int]:
        """Return a prompt of which nothing is cached, as long as no other has the same first token."""
        return [first % vocab, *(token % vocab for token in range(count - 1))]

    repeats = order["repeats"]
    prefills = [seconds([ids(prompt, turn)], 1) for turn in range(repeats + 1)]
    prompts = [ids(context, repeats + 1 + sequence) for sequence in range(sequences)]
    seconds(prompts, 1 + DECODES)
    decodes = [(seconds(prompts, 1 + DECODES) - seconds(prompts, 1)) / DECODES for _ in range(repeats)]
    return {
        "version": vllm.__version__, "started_seconds": round(started_seconds, 1),
        "prefill_seconds": statistics.median(prefills[1:]), "decode_seconds": statistics.median(decodes),
    }  # fmt: skip


def main() -> None:
    order = json.loads(sys.stdin.readline())
    Thread(target=end_with_input, daemon=True).start()
    try:
        import vllm  # noqa: F401 - a release may be broken where it was installed
    except ImportError as error:
        found = {
            "skipped": f"{sys.executable} cannot import vLLM ({error}); install it there, or name another"
        }
    else:
        found = measure(order)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
