"""A rank reads its slices and nothing else; a checkpoint that does not fit is refused by tensor name."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from medha.errors import CheckpointInvalid, ConfigInvalid, ModelUnsupported
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.device import host_device
from medha_worker.kernels.packed_weight import PackedWeight, matrix_of
from medha_worker.model import weights as weights_module
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.weights import LayerWeights, Shard, Weights, load_weights

# The tiny preset: 2 layers, 4 query heads, 2 KV heads of 32, hidden 128, intermediate 352, vocabulary 512.
LAYERS = 2


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("weights") / request.param
    init_checkpoint(directory, preset="tiny", seed=3, architecture=request.param)
    return directory


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pristine") / "llama"
    init_checkpoint(directory, preset="tiny", seed=3)
    return directory


@pytest.fixture
def llama(pristine: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    return Path(shutil.copytree(pristine, tmp_path / "llama"))


def load(
    directory: Path, shard: Shard | None = None, dtype: torch.dtype = torch.float32, **options: Any
) -> Weights:
    config = ModelConfig.from_directory(directory)
    return load_weights(directory, config, shard or Shard.whole(config), device=host_device(dtype), **options)


def tensor_shards(size: int) -> list[Shard]:
    return [Shard(rank, size, 0, LAYERS, LAYERS) for rank in range(size)]


def split_over_files(directory: Path, file_of: dict[str, str] | None = None) -> None:
    """Turn a single-file checkpoint into a sharded one: a file per layer, one for the rest."""
    tensors = load_file(directory / "model.safetensors")
    weight_map = {
        name: f"layer-{name.split('.')[2]}.safetensors" if ".layers." in name else "rest.safetensors"
        for name in tensors
    } | (file_of or {})
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, directory / file)
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


class Recorder:
    """Wraps safetensors, and records every part that the reader reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read_elements: dict[str, int] = {}
        self.opened: set[str] = set()
        recorder, real_open = self, weights_module.safe_open

        class RecordedSlice:
            def __init__(self, name: str, stored: Any) -> None:
                self.name, self.stored = name, stored

            def get_shape(self) -> Any:
                return self.stored.get_shape()

            def get_dtype(self) -> Any:
                return self.stored.get_dtype()

            def __getitem__(self, index: Any) -> torch.Tensor:
                return recorder.note(self.name, self.stored[index])

        class RecordedFile:
            def __init__(self, path: Path, **options: Any) -> None:
                self.file = real_open(path, **options)
                recorder.opened.add(Path(path).name)

            def __enter__(self) -> "RecordedFile":
                self.file.__enter__()
                return self

            def __exit__(self, *error: object) -> None:
                self.file.__exit__(*error)

            def keys(self) -> Any:
                return self.file.keys()

            def get_slice(self, name: str) -> RecordedSlice:
                return RecordedSlice(name, self.file.get_slice(name))

            def get_tensor(self, name: str) -> torch.Tensor:
                return recorder.note(name, self.file.get_tensor(name))

        monkeypatch.setattr(weights_module, "safe_open", RecordedFile)

    def note(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.read_elements[name] = self.read_elements.get(name, 0) + tensor.numel()
        return tensor


def test_a_stage_opens_and_reads_only_its_own_layers(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split_over_files(llama)
    recorder = Recorder(monkeypatch)
    last = load(llama, Shard(0, 1, 1, 2, 2))
    assert recorder.opened == {"layer-1.safetensors", "rest.safetensors"}
    assert {name for name in recorder.read_elements if ".layers." not in name} == {
        "model.norm.weight",
        "lm_head.weight",
    }
    assert last.embedding is None
    assert len(last.layers) == 1

    recorder.read_elements.clear()
    first = load(llama, Shard(0, 1, 0, 1, 2))
    assert {name for name in recorder.read_elements if ".layers.0." not in name} == {
        "model.embed_tokens.weight"
    }
    assert first.head is None
    assert first.final_norm is None


@pytest.mark.parametrize("tensor_size", [2, 4])
def test_a_tensor_rank_reads_its_share_of_each_matrix(
    checkpoint: Path, tensor_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more ranks than KV heads (4 for 2), each rank reads one whole KV head."""
    recorder = Recorder(monkeypatch)
    load(checkpoint, tensor_shards(tensor_size)[1])
    sizes = {name: tensor.numel() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    for name, elements in recorder.read_elements.items():
        if "norm" in name:
            share = 1
        elif "k_proj" in name or "v_proj" in name:
            share = min(tensor_size, 2)
        else:
            share = tensor_size
        assert elements * share == sizes[name], name
    assert recorder.read_elements.keys() == sizes.keys()


@pytest.mark.parametrize("tensor_size", [2, 4])
def test_the_slices_of_all_tensor_ranks_together_are_the_checkpoint(
    checkpoint: Path, tensor_size: int
) -> None:
    stored = load_file(checkpoint / "model.safetensors")
    ranks = [load(checkpoint, shard) for shard in tensor_shards(tensor_size)]
    q_width, kv_width = 128 // tensor_size, max(32, 64 // tensor_size)
    for index in range(LAYERS):
        layers = [rank.layers[index] for rank in ranks]
        attention, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."

        def joined(parts: list[torch.Tensor], copies: int = 1) -> torch.Tensor:
            """Join the output columns of all ranks to the file's [out, in]; copies on several ranks count once."""
            return torch.cat(parts[::copies], dim=-1).t()

        copies = max(1, tensor_size // 2)
        split = [layer.qkv.split((q_width, kv_width, kv_width), dim=1) for layer in layers]
        assert torch.equal(joined([part[0] for part in split]), stored[f"{attention}q_proj.weight"])
        assert torch.equal(joined([part[1] for part in split], copies), stored[f"{attention}k_proj.weight"])
        assert torch.equal(joined([part[2] for part in split], copies), stored[f"{attention}v_proj.weight"])
        for first in range(0, tensor_size, copies):
            assert all(torch.equal(split[first][1], replica[1]) for replica in split[first : first + copies])
        gates, ups = zip(*(layer.gate_up.chunk(2, dim=1) for layer in layers), strict=True)
        assert torch.equal(joined(list(gates)), stored[f"{mlp}gate_proj.weight"])
        assert torch.equal(joined(list(ups)), stored[f"{mlp}up_proj.weight"])
        assert torch.equal(
            torch.cat([layer.output for layer in layers]).t(), stored[f"{attention}o_proj.weight"]
        )
        assert torch.equal(torch.cat([layer.down for layer in layers]).t(), stored[f"{mlp}down_proj.weight"])
        if layers[0].qkv_bias is not None:
            queries = [layer.qkv_bias[:q_width] for layer in layers if layer.qkv_bias is not None]
            assert torch.equal(torch.cat(queries), stored[f"{attention}q_proj.bias"])
    assert [rank.vocab_start for rank in ranks] == list(range(0, 512, 512 // tensor_size))
    embeddings = [rank.embedding for rank in ranks if rank.embedding is not None]
    assert torch.equal(torch.cat(embeddings), stored["model.embed_tokens.weight"])
    heads = [rank.head for rank in ranks if rank.head is not None]
    assert torch.equal(torch.cat(heads, dim=1).t(), stored["lm_head.weight"])


def test_the_bias_of_a_row_parallel_linear_is_with_the_first_rank_alone(llama: Path) -> None:
    """An all-reduce sums the ranks' results; a bias on each would be counted twice."""
    add_biases(llama)
    first, second = (load(llama, shard).layers[0] for shard in tensor_shards(2))
    assert first.output_bias is not None
    assert first.down_bias is not None
    assert second.output_bias is None
    assert second.down_bias is None
    assert second.qkv_bias is not None
    assert second.gate_up_bias is not None


def add_biases(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    for name in list(tensors):
        if name.endswith("_proj.weight"):
            tensors[name.replace(".weight", ".bias")] = torch.randn(tensors[name].shape[0])
    save_file(tensors, directory / "model.safetensors")
    change_config(directory, attention_bias=True, mlp_bias=True)


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def tensors_of(weights: Weights) -> Iterator[torch.Tensor]:
    holders: list[Weights | LayerWeights] = [weights, *weights.layers]
    for holder in holders:
        for field in fields(holder):
            if isinstance(value := getattr(holder, field.name), torch.Tensor):
                yield value


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("run", [torch.float32, torch.bfloat16])
def test_every_format_is_converted_to_the_run_dtype(
    llama: Path, stored: torch.dtype, run: torch.dtype
) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in load_file(llama / "model.safetensors").items()}
    save_file(tensors, llama / "model.safetensors")
    weights = load(llama, dtype=run)
    assert {tensor.dtype for tensor in tensors_of(weights)} == {run}
    assert weights.embedding is not None
    assert torch.equal(weights.embedding, tensors["model.embed_tokens.weight"].to(run))


def test_weights_of_products_are_packed_and_hold_the_same_numbers(llama: Path) -> None:
    plain, packed = load(llama), load(llama, pack=lambda weight: PackedWeight(weight[None].clone()))
    names = {"qkv", "output", "gate_up", "down"}
    for before, after in zip(plain.layers, packed.layers, strict=True):
        for field in fields(before):
            was, now = getattr(before, field.name), getattr(after, field.name)
            assert isinstance(now, PackedWeight) == (field.name in names), field.name
            assert was is now is None or torch.equal(was, matrix_of(now)), field.name
    assert plain.embedding is not None
    assert packed.embedding is not None
    assert torch.equal(plain.embedding, packed.embedding)
    assert isinstance(plain.head, torch.Tensor)
    assert isinstance(packed.head, PackedWeight)
    assert torch.equal(plain.head, packed.head.numbers())


def test_progress_ends_at_the_total(checkpoint: Path) -> None:
    seen: list[tuple[int, int]] = []
    load(checkpoint, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len({total for _, total in seen}) == 1
    assert len(seen) > 10


def test_harmless_leftovers_are_passed_over(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(16)
    save_file(tensors, llama / "model.safetensors")
    assert len(load(llama).layers) == LAYERS


def test_a_tied_checkpoint_that_stores_a_head_of_its_own_is_served_with_it(llama: Path) -> None:
    """Transformers does the same: it ties only equal tensors."""
    change_config(llama, tie_word_embeddings=True)
    weights, stored = load(llama), load_file(llama / "model.safetensors")
    assert weights.head is not None
    assert torch.equal(weights.head.t(), stored["lm_head.weight"])

    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, llama / "model.safetensors")
    weights = load(llama)
    assert weights.head is not None
    assert weights.embedding is not None
    assert weights.head.data_ptr() == weights.embedding.data_ptr()


def damage(directory: Path, kind: str) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    match kind:
        case "missing tensor":
            del tensors["model.layers.1.mlp.up_proj.weight"]
        case "unexpected tensor":
            tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(128)
        case "one layer too many":
            tensors["model.layers.2.input_layernorm.weight"] = torch.zeros(128)
        case "misshaped tensor":
            tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(32, 128)
        case "misshaped norm":
            tensors["model.norm.weight"] = torch.zeros(127)
    save_file(tensors, path)
    match kind:
        case "missing file":
            path.unlink()
        case "weights as torch saves them":
            path.rename(directory / "pytorch_model.bin")
        case "weights in Mistral's form":
            path.rename(directory / "consolidated.safetensors")
        case "truncated file":
            path.write_bytes(path.read_bytes()[:-1000])
        case "no safetensors file":
            path.write_bytes(b"<html>Not found</html>")
        case "missing part":
            split_over_files(directory)
            (directory / "layer-1.safetensors").unlink()
        case "index of another file":
            split_over_files(directory)
            index = directory / "model.safetensors.index.json"
            weight_map = json.loads(index.read_text())["weight_map"]
            weight_map["model.norm.weight"] = "layer-0.safetensors"
            index.write_text(json.dumps({"weight_map": weight_map}))
        case "index without a map":
            (directory / "model.safetensors.index.json").write_text('{"metadata": {}}')
        case "index that leaves the directory":
            (directory / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"model.norm.weight": "../../etc/secrets.safetensors"}})
            )


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("missing tensor", r"model\.layers\.1\.mlp\.up_proj\.weight of shape \[352, 128\] is missing"),
        ("unexpected tensor", r"model\.layers\.1\.self_attn\.q_proj\.bias is unexpected"),
        ("one layer too many", r"model\.layers\.2\.input_layernorm\.weight is unexpected"),
        (
            "misshaped tensor",
            r"model\.layers\.0\.self_attn\.k_proj\.weight has shape \[32, 128\].*\[64, 128\]",
        ),
        ("misshaped norm", r"model\.norm\.weight has shape \[127\].*\[128\]"),
        ("missing file", r"model\.safetensors is missing; fetch"),
        (
            "weights as torch saves them",
            r"is missing, and pytorch_model\.bin is in another form; choose .* model\.safetensors",
        ),
        ("weights in Mistral's form", r"is missing, and consolidated\.safetensors is in another form"),
        ("truncated file", r"model\.safetensors: is no complete safetensors file"),
        ("no safetensors file", r"model\.safetensors: is no complete safetensors file"),
        ("missing part", r"layer-1\.safetensors is missing"),
        ("index of another file", r"layer-0\.safetensors: tensor model\.norm\.weight cannot be read"),
        ("index without a map", r"index\.json: has no readable weight_map"),
        ("index that leaves the directory", r"model\.norm\.weight is said to be in '\.\./\.\./etc/secrets"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_the_name_of_what_is_wrong(
    llama: Path, kind: str, named: str
) -> None:
    damage(llama, kind)
    with pytest.raises(CheckpointInvalid, match=named):
        load(llama)


def test_quantised_tensors_are_refused_by_name_and_format(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(128, dtype=torch.int8)
    save_file(tensors, llama / "model.safetensors")
    with pytest.raises(ModelUnsupported, match=r"model\.norm\.weight is stored as I8.*bfloat16"):
        load(llama)


@pytest.mark.parametrize(("tensor_size", "named"), [(3, "num_attention_heads"), (64, "num_attention_heads")])
def test_a_split_that_does_not_divide_the_model_is_refused(llama: Path, tensor_size: int, named: str) -> None:
    with pytest.raises(ConfigInvalid, match=rf"parallelism\.tensor is {tensor_size}.*{named}"):
        load(llama, Shard(0, tensor_size, 0, LAYERS, LAYERS))


def test_a_split_that_would_cut_a_kv_head_is_refused(llama: Path) -> None:
    change_config(llama, num_attention_heads=12, num_key_value_heads=6, intermediate_size=352, head_dim=32)
    with pytest.raises(ConfigInvalid, match=r"parallelism\.tensor is 4.*num_key_value_heads \(6\)"):
        load(llama, Shard(0, 4, 0, LAYERS, LAYERS))
