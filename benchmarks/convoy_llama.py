"""Serve a checkpoint with llama.cpp; `convoy.py` runs this script in an interpreter that has `xllamacpp` and `gguf`.

    PATH/python convoy_llama.py CHECKPOINT PORT THREADS

The checkpoint (a Llama with a byte-level tokenizer, float32) is first written as GGUF, beside it. Weights and KV stay in float32.
"""

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp
from safetensors.numpy import load_file

CONTEXT_TOKENS, SLOTS, BATCH_TOKENS = 131_072, 32, 512
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of q or k in the order of llama.cpp, whose RoPE turns neighbours instead of halves."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(checkpoint: Path, target: Path) -> None:
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    tokenizer: dict[str, Any] = json.loads((checkpoint / "tokenizer.json").read_text())
    rope = config.get("rope_parameters") or config
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    words = {number: word for word, number in tokenizer["model"]["vocab"].items()}
    special = {one["id"]: one["content"] for one in tokenizer["added_tokens"]}
    words |= special
    tokens = [words.get(number, f"<unused {number}>") for number in range(config["vocab_size"])]
    kinds = [
        gguf.TokenType.CONTROL if number in special else gguf.TokenType.NORMAL
        for number in range(config["vocab_size"])
    ]
    merges = [one if isinstance(one, str) else " ".join(one) for one in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem in WHOLE:
            writer.add_tensor(f"{WHOLE[stem]}.weight", weight)
            continue
        _, _, layer, part = stem.split(".", 3)
        if NAMES[part] in ("attn_q", "attn_k"):
            weight = permuted(weight, heads if NAMES[part] == "attn_q" else kv_heads)
        writer.add_tensor(f"blk.{layer}.{NAMES[part]}.weight", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(checkpoint: Path, port: int, threads: int) -> None:
    target = checkpoint.with_suffix(".gguf")
    write_gguf(checkpoint, target)
    params = xllamacpp.CommonParams()
    params.model.path = str(target)
    params.model_alias = {"small"}
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_ctx, params.n_parallel, params.kv_unified = CONTEXT_TOKENS, SLOTS, True
    params.n_batch = params.n_ubatch = BATCH_TOKENS
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_prompt, params.cache_ram_mib, params.n_ctx_checkpoints = False, 0, 0
    params.ctx_shift = params.ui = False
    server = xllamacpp.Server(params)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # llama.cpp's own handler does not end the process
    print(server.listening_address, flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
