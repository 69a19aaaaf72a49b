"""The quantised formats of linear layers, as a checkpoint's `config.json` describes them, and the tensors that each stores.

`decode` reads `quantization_config` field by field. A field that changes results is implemented or refused, never
ignored. The formats are those of compressed-tensors (integers of 8 bits, packed integers of 4 or 8 bits, FP8),
DeepSeek's FP8 blocks, AWQ and GPTQ, and MXFP4 for experts in one tensor.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from medha.errors import CheckpointInvalid, ModelUnsupported

Layout = Literal["bytes", "packed", "awq", "gptq", "mxfp4"]
"""The way in which values lie in a file: one in each byte, several in a word of 32 bits, or two in each byte."""

_FLOATS = frozenset({"F32", "BF16", "F16"})
_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint: the shapes and safetensors' names of number formats that it may have."""

    shapes: tuple[tuple[int, ...], ...]
    formats: frozenset[str] = _FLOATS


@dataclass(frozen=True, slots=True)
class ActivationFormat:
    """The rounding of activations before a product.

    Attributes:
        kind: Numbers that activations are rounded to: integers of 8 bits, or FP8 (E4M3).
        is_static: True if the checkpoint stores one scale, `input_scale`; else each row has its own.
        group_size: Neighbouring values of a row that share a scale; None if the whole row does.
        has_power_scales: True if scales are rounded up to powers of two (UE8M0).
    """

    kind: Literal["int8", "float8"]
    is_static: bool = False
    group_size: int | None = None
    has_power_scales: bool = False


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The form in which the weight of a linear layer, [rows, columns], is stored.

    Attributes:
        name: Its name in messages.
        layout: See `Layout`.
        is_float: True for FP8 (E4M3) and FP4 (E2M1), False for integers.
        bits: Bits of one value.
        has_zero_points: True if a zero point is subtracted from the values of each group.
        group_size: Neighbouring columns that share a scale; None if all do.
        block_rows: Neighbouring rows that share a scale; None if all do.
        scale_name: Name of the tensor of scales, without the layer's.
        scale_bytes: Bytes of a scale as writers store it; None if it has the type of unquantised values.
        has_group_index: True if a tensor says which group each column belongs to.
        zero_point_offset: Number that is added to stored zero points, modulo 2^bits.
        scale_formats: safetensors' names of the number formats in which scales may be stored.
        activations: Rounding of activations; None leaves them as they are.
    """

    name: str
    layout: Layout = "bytes"
    is_float: bool = False
    bits: int = 8
    has_zero_points: bool = False
    group_size: int | None = None
    block_rows: int | None = 1
    scale_name: str = "weight_scale"
    scale_bytes: int | None = None
    scale_formats: frozenset[str] = _FLOATS
    has_group_index: bool = False
    zero_point_offset: int = 0
    activations: ActivationFormat | None = None

    @property
    def per_word(self) -> int:
        """Number of values in a word of 32 bits."""
        return _WORD_BITS // self.bits

    def groups(self, columns: int) -> int:
        """Return the number of groups of a row of so many columns; the last one may be shorter."""
        return 1 if self.group_size is None else -(-columns // self.group_size)

    def require_divisible(self, layer: str, rows: int, columns: int) -> None:
        """Check that whole words hold the values, where the format knows no other form.

        Raises:
            CheckpointInvalid: they do not.
        """
        packed = {"awq": ("rows", rows), "gptq": ("columns", columns)}.get(self.layout)
        if self.layout == "gptq" and rows % self.per_word:
            packed = "rows", rows
        if packed is not None and packed[1] % self.per_word:
            raise CheckpointInvalid(
                f"{layer} has {packed[1]} {packed[0]}, but {self.name} packs {self.per_word} values into a word; "
                "choose a checkpoint that leaves this layer unquantised"
            )

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        """Return the tensors of a layer whose weight is [rows, columns], by their names without the layer's."""
        groups, words, integers = self.groups(columns), self.per_word, frozenset({"I32"})
        if self.layout in ("awq", "gptq"):
            weight = (columns, -(-rows // words)) if self.layout == "awq" else (-(-columns // words), rows)
            found = {
                "qweight": StoredTensor((weight,), integers),
                "qzeros": StoredTensor(((groups, -(-rows // words)),), integers),
                "scales": StoredTensor(((groups, rows),)),
            }
            if self.layout == "gptq":
                found["g_idx"] = StoredTensor(((columns,),), integers)
            return found
        if self.layout == "packed":
            found = {
                "weight_packed": StoredTensor(((rows, -(-columns // words)),), integers),
                "weight_shape": StoredTensor(((2,),), frozenset({"I64", "I32"})),
            }
        else:
            found = {
                "weight": StoredTensor(((rows, columns),), frozenset({"F8_E4M3" if self.is_float else "I8"}))
            }
        of_tensor = self.block_rows is None
        blocks = 1 if self.block_rows is None else -(-rows // self.block_rows)
        scales = ((1,), (), (1, 1)) if of_tensor else ((blocks, groups),)
        found[self.scale_name] = StoredTensor(scales, self.scale_formats)
        if self.has_zero_points and self.layout == "packed":
            found["weight_zero_point"] = StoredTensor(((-(-rows // words), groups),), integers)
        elif self.has_zero_points:
            found["weight_zero_point"] = StoredTensor(scales, frozenset({"I8"}))
        if self.has_group_index:
            found["weight_g_idx"] = StoredTensor(((columns,),), integers)
        if self.activations is not None and self.activations.is_static:
            found["input_scale"] = StoredTensor(((1,), ()))
        return found

    def held_bytes(
        self, rows: int, columns: int, element_bytes: int, *, is_for_device_units: bool = False
    ) -> int:
        """Return the memory of a weight of [rows, columns].

        A scale has `scale_bytes`, or, if the format does not say, the `element_bytes` of an unquantised value.
        `is_for_device_units`: if a GPU's units for 8 and 4 bits can multiply with the weight, it is held in their form.
        """
        blocks = 1 if self.block_rows is None else -(-rows // self.block_rows)
        groups = self.groups(columns)
        if is_for_device_units and (scales_bytes := self._scales_bytes_for_units(rows, columns)) is not None:
            return rows * columns * self.bits // 8 + scales_bytes
        is_static = self.activations is not None and self.activations.is_static
        has_index = self.has_group_index or (groups > 1 and columns % (self.group_size or columns) > 0)
        return (
            rows * -(-columns * self.bits // 8)
            + blocks * groups * ((self.scale_bytes or element_bytes) + int(self.has_zero_points))
            + 4 * columns * int(has_index)
            + (self.scale_bytes or element_bytes) * int(is_static)
        )

    def _scales_bytes_for_units(self, rows: int, columns: int) -> int | None:
        """Return the bytes of the scales if a GPU's units can multiply with the weight; None if they cannot."""
        if self.bits == 4 and not self.is_float:
            is_taken = (
                self.activations is None
                and not self.has_group_index
                and self.block_rows == 1
                and self.group_size in INT4_GROUPS
                and columns % self.group_size == rows % INT4_ROWS == 0
            )
            return rows * self.groups(columns) * 2 * _UNIT_VALUE_BYTES if is_taken else None
        if self.layout != "bytes" or self.has_zero_points or self.activations is None:
            return None
        own, other = self.group_size, self.activations.group_size
        if self.is_float and own == other == self.block_rows == FP8_BLOCK:
            if rows % FP8_BLOCK or columns % FP8_BLOCK:
                return None
            groups = self.groups(columns)
            return rows // FP8_BLOCK * (groups + -groups % FP8_BLOCKS_ALIGNED) * _SCALE_BYTES
        aligned = FP8_ALIGNED if self.is_float else INT8_ALIGNED
        is_taken = (
            own is other is None
            and self.block_rows in (None, 1)
            and rows % aligned == columns % aligned == 0
            and (self.is_float or (not self.activations.is_static and columns <= INT8_MOST_COLUMNS))
        )
        return (rows + self.activations.is_static) * _SCALE_BYTES if is_taken else None


INT4_GROUPS = (32, 64, 128, 256)
"""Neighbouring columns of INT4 that may share a scale where a GPU's units multiply with them."""
INT4_ROWS = 8
"""The number of rows of such a weight is a multiple of this."""
INT8_ALIGNED, FP8_ALIGNED = 8, 16
"""Rows and columns of weights in INT8, and in FP8, are multiples of these for a GPU's units."""
INT8_MOST_COLUMNS = 2**31 // 2**14 - 1
"""Most columns of INT8 whose products cannot overflow 32 bits when they are added up: each is at most 128 x 128."""
FP8_BLOCK = 128
"""Rows and columns that share a scale in the blocks that a GPU's units take."""
FP8_BLOCKS_ALIGNED = 4
"""In memory, the scales of a row of blocks are padded to a multiple of this number."""
_SCALE_BYTES = 4  # of float32
_UNIT_VALUE_BYTES = 2  # of bfloat16: a scale and a shift for each row and group

MXFP4_BLOCK = 32
"""Neighbouring values of a row that share a scale in MXFP4, a power of two."""
MXFP4 = WeightFormat("MXFP4", "mxfp4", is_float=True, bits=4, group_size=MXFP4_BLOCK, scale_bytes=1)
"""FP4 (E2M1) with a scale for each block of a row: the format of gpt-oss' experts."""

_EVERY_EXPERT = r"model\.layers\.\d+\.mlp\.experts$"
_EXPERTS = "model.layers.0.mlp.experts"


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The format of each linear layer of a checkpoint.

    Attributes:
        method: The name of `quant_method`.
        formats: Formats, each with the layers that it is for: names, `re:` and an expression, or `Linear` for all.
        ignored: Layers that are not quantised, named in the same way.
        ignores_parts: True if an entry also ignores the layers in whose names it stands between dots.
        ignores_any_part: True if an entry ignores all layers whose names contain it. In AutoAWQ, `gate` ignores `gate_proj`.
        kv_scales: Whether each layer (`tensor`) or each head (`attn_head`) has stored scales for K and V in FP8; None: there
            are none.
    """

    method: str
    formats: tuple[tuple[tuple[str, ...], WeightFormat], ...]
    ignored: tuple[str, ...] = ()
    ignores_parts: bool = False
    ignores_any_part: bool = False
    kv_scales: Literal["tensor", "attn_head"] | None = None

    def format_of(self, layer: str) -> WeightFormat | None:
        """Return the format of a linear layer such as `model.layers.0.mlp.up_proj`; None if it is not quantised."""
        inside = f".{layer}."
        if self.ignores_parts and any(f".{entry}." in inside for entry in self.ignored):
            return None
        if self.ignores_any_part and any(entry in layer for entry in self.ignored):
            return None
        if any(_names(entry, layer) for entry in self.ignored):
            return None
        # A layer's own name takes precedence over an expression, and an expression over the name of the class.
        for rank in (0, 1, 2):
            for targets, form in self.formats:
                if any(_rank(target) == rank and _names(target, layer) for target in targets):
                    return form
        return None

    def joint_expert_bytes(self, hidden: int, intermediate: int) -> float | None:
        """Return the mean bytes of a weight, scales included, in a tensor for all experts; None if that is not quantised."""
        form = self.format_of(_EXPERTS)
        if form is None:
            return None
        held = form.held_bytes(2 * intermediate, hidden, 0) + form.held_bytes(hidden, intermediate, 0)
        return held / (3 * hidden * intermediate)


def decode(
    value: object,
    source: str = "config.json: quantization_config",
    *,
    expert_methods: tuple[str, ...] | None = None,
) -> Quantisation:
    """Return the description that `value`, a checkpoint's `quantization_config`, has of its layers.

    Args:
        value: The JSON value.
        source: Its name in errors.
        expert_methods: The methods in which a mixture of experts may be quantised; None for a dense model.

    Raises:
        ModelUnsupported: the method, or one of its settings, is not supported by this model; the text says which.
        CheckpointInvalid: a field is missing, has the wrong type, or contradicts another one.
    """
    fields = _Settings(value, source)
    if expert_methods is not None and fields.get("quant_method") not in expert_methods:
        raise ModelUnsupported(
            f"{source}.quant_method is {fields.get('quant_method')!r}, but models of this type are served in "
            f"{' or '.join(expert_methods)} alone; choose such a checkpoint, or the unquantised one (bfloat16, float16 or "
            "float32)"
        )
    method = fields.text("quant_method")
    if expert_methods is None and method not in LINEAR_METHODS:
        raise fields.unsupported("quant_method", f"one of {', '.join(LINEAR_METHODS)}")
    return _METHODS[method](fields)


def shown(value: object) -> str:
    """Return a value as errors show it; a long one, such as a list of all layers, loses its middle."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:80]}...{text[-20:]}"


class _Settings:
    """A JSON object whose fields are checked as they are read; errors give the field and its value."""

    def __init__(self, value: object, path: str) -> None:
        self.path = path
        if not isinstance(value, dict):
            raise CheckpointInvalid(
                f"{path} is {shown(value)}, but must be an object; fetch the checkpoint again"
            )
        self.values: dict[str, Any] = value

    def invalid(self, name: str, wanted: str) -> CheckpointInvalid:
        found = f"is {shown(self.values[name])}" if name in self.values else "is missing"
        return CheckpointInvalid(
            f"{self.path}.{name} {found}, but must be {wanted}; fetch the checkpoint again or correct the field"
        )

    def unsupported(self, name: str, supported: str) -> ModelUnsupported:
        return ModelUnsupported(
            f"{self.path}.{name} is {shown(self.values.get(name))}, which is not supported; "
            f"choose a checkpoint with {supported}, or the unquantised one"
        )

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str):
            raise self.invalid(name, "a name")
        return value

    def choice(self, name: str, *supported: object) -> Any:
        """Return the field's value if it is supported; the first is the default of a field that is absent."""
        value = self.values.get(name, supported[0])
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in supported):
            raise self.unsupported(name, " or ".join(repr(one) for one in supported if one is not None))
        return value

    def boolean(self, name: str, default: bool) -> bool:
        """Return a truth value; null is false, as in transformers, where that is the default."""
        value = self.values.get(name, default)
        if value is None and not default:
            return False
        if not isinstance(value, bool):
            raise self.invalid(name, "true or false")
        return value

    def size(self, name: str) -> int:
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.invalid(name, "a whole number of at least 1")
        return value

    def group_size(self, name: str) -> int | None:
        """Return columns that share a scale; None for -1, which means all."""
        return None if self.values.get(name) == -1 else self.size(name)

    def pair(self, name: str) -> tuple[int, int]:
        value = self.values.get(name)
        if not (
            isinstance(value, list) and len(value) == 2 and all(type(one) is int and one > 0 for one in value)
        ):
            raise self.invalid(name, "a list of two whole numbers of at least 1")
        return value[0], value[1]

    def names(self, name: str) -> tuple[str, ...]:
        """Return a list of names of layers, whose expressions can be compiled; absent and null are empty."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.invalid(name, "a list of names")
        for one in value:
            try:
                re.compile(one.removeprefix("re:") if one.startswith("re:") else "")
            except (re.error, OverflowError, RecursionError) as error:
                raise self.invalid(
                    name, f"a list of names and valid expressions ({shown(one)}: {error})"
                ) from error
        return tuple(value)

    def nested_names(self, name: str) -> tuple[str, ...]:
        """Return the names of a list of names, or of a list of such lists; absent and null are empty."""
        value = self.values.get(name)
        lists = value if isinstance(value, list) and all(isinstance(one, list) for one in value) else [value]
        return tuple(one for some in lists for one in _Settings({name: some}, self.path).names(name))

    def inner(self, name: str) -> _Settings:
        return _Settings(self.values.get(name), f"{self.path}.{name}")

    def refuse(self, *names: str) -> None:
        """Refuse fields that change results, unless they are absent, null or empty."""
        for name in names:
            if self.values.get(name):
                raise self.unsupported(name, f"no {name}")


def _rank(target: str) -> int:
    return 2 if target == _EVERY_LINEAR else int(target.startswith("re:"))


def _names(target: str, layer: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), layer) is not None
    return target in (layer, _EVERY_LINEAR)


_EVERY_LINEAR = "Linear"


def _compressed_tensors(fields: _Settings) -> Quantisation:
    fields.refuse("transform_config")
    kv_scales = _kv_scales(fields.inner("kv_cache_scheme")) if fields.get("kv_cache_scheme") else None
    sparsity = fields.get("sparsity_config")
    if sparsity and (not isinstance(sparsity, dict) or sparsity.get("format") != "dense"):
        raise fields.unsupported("sparsity_config", "dense weights")
    fields.choice("quantization_status", "compressed", "frozen")
    if kv_scales is not None and not fields.get("config_groups"):
        return Quantisation("compressed-tensors", (), kv_scales=kv_scales)
    groups = fields.inner("config_groups")
    if not groups.values:
        raise fields.invalid("config_groups", "an object with at least one group")
    formats = []
    for name in groups.values:
        group = groups.inner(name)
        targets = group.names("targets")
        if not targets:
            raise group.invalid("targets", "a list of at least one name")
        formats.append((targets, _compressed_group(group, fields)))
    return Quantisation("compressed-tensors", tuple(formats), fields.names("ignore"), kv_scales=kv_scales)


def _kv_scales(scheme: _Settings) -> Literal["tensor", "attn_head"]:
    """Return whether each layer or each head has a scale for K and V; scales for other types than FP8 are refused."""
    if scheme.get("type") != "float":  # absent, it is "int"
        raise scheme.unsupported("type", "type 'float' (FP8)")
    scheme.choice("num_bits", 8)
    scheme.choice("dynamic", False)
    scheme.choice("symmetric", True)
    strategy: Literal["tensor", "attn_head"] = scheme.choice("strategy", "tensor", "attn_head")
    return strategy


def _compressed_group(group: _Settings, fields: _Settings) -> WeightFormat:
    group.refuse("output_activations")
    if group.get("weights") is None:
        raise group.unsupported("weights", "quantised weights in each of config_groups (not attention alone)")
    weights = group.inner("weights")
    holder = fields if group.get("format") is None else group
    form = holder.choice(
        "format", None, "int-quantized", "pack-quantized", "float-quantized", "naive-quantized"
    )
    if form is None:
        raise holder.invalid("format", "the name of a format")
    kind = weights.choice("type", "int", "float")
    if (form == "float-quantized") != (kind == "float") and form != "naive-quantized":
        raise weights.invalid("type", f"that of the format {form}")
    is_packed = form == "pack-quantized"
    bits = weights.choice("num_bits", *((4, 8) if is_packed else (8,)))
    weights.choice("dynamic", False)
    is_symmetric = weights.boolean("symmetric", True)
    if kind == "float" and not is_symmetric:
        raise weights.unsupported("symmetric", "true")
    strategy = _strategy(weights)
    group_size: int | None = None
    block_rows: int | None = 1
    match strategy:
        case "group":
            group_size = weights.size("group_size")
        case "block" if kind == "float":
            block_rows, group_size = weights.pair("block_structure")
        case "channel":
            pass
        case "tensor" if not is_packed:
            block_rows = None
        case _:
            others = "group or channel" if is_packed else "channel, group, tensor or (of FP8) block"
            raise weights.unsupported("strategy", others)
    order = weights.get("actorder")
    if order not in (None, False, "weight", "static", "group", "dynamic"):
        raise weights.unsupported("actorder", "'weight' or 'group'")
    has_index = order in ("group", "dynamic")
    if has_index and not (is_packed and strategy == "group"):
        raise weights.unsupported("actorder", "the order of packed groups")
    activations = _activations(group)
    return WeightFormat(
        f"{form} of {bits} bits",
        layout="packed" if is_packed else "bytes",
        is_float=kind == "float",
        bits=bits,
        has_zero_points=not is_symmetric,
        group_size=group_size,
        block_rows=block_rows,
        has_group_index=has_index,
        activations=activations,
    )


def _strategy(values: _Settings) -> str:
    """Return the strategy, which older files imply by the group's size."""
    if values.get("strategy") is not None:
        return values.text("strategy")
    size = values.get("group_size")
    return "tensor" if size is None else "channel" if size == -1 else "group"


def _activations(group: _Settings) -> ActivationFormat | None:
    if group.get("input_activations") is None:
        return None
    fields = group.inner("input_activations")
    kind: Literal["int8", "float8"] = "int8" if fields.choice("type", "int", "float") == "int" else "float8"
    fields.choice("num_bits", 8)
    fields.choice("symmetric", True)
    is_static = not fields.choice("dynamic", False, True)
    strategy = _strategy(fields)
    if strategy == "group" and not is_static:
        return ActivationFormat(kind, group_size=fields.size("group_size"))
    if strategy != ("tensor" if is_static else "token"):
        raise fields.unsupported("strategy", "'token' if dynamic is true, else 'tensor'")
    return ActivationFormat(kind, is_static)


_SERVED_FP8 = (
    "FP8 in blocks (both activation_scheme 'dynamic' and a weight_block_size such as [128, 128]), one with quant_method "
    "'compressed-tensors', where FP8 may also have a scale for each row or tensor"
)


def _fine_grained_fp8(fields: _Settings) -> Quantisation:
    fields.choice("fmt", "e4m3")
    # AutoFP8 and others have scales for whole tensors under this name, each with other names of tensors.
    if fields.values.get("activation_scheme", "dynamic") != "dynamic":
        raise fields.unsupported("activation_scheme", _SERVED_FP8)
    if fields.get("weight_block_size") is None:
        raise fields.unsupported("weight_block_size", _SERVED_FP8)
    has_powers = fields.choice("scale_fmt", None, "float", "ue8m0") == "ue8m0"
    rows, columns = fields.pair("weight_block_size")
    form = WeightFormat(
        "FP8 in blocks",
        is_float=True,
        group_size=columns,
        block_rows=rows,
        scale_name="weight_scale_inv",
        scale_bytes=4,
        scale_formats=_FLOATS | {"F8_E8M0"} if has_powers else _FLOATS,
        activations=ActivationFormat("float8", group_size=columns, has_power_scales=has_powers),
    )
    return _of_every_layer("fp8", form, fields)


def _awq(fields: _Settings) -> Quantisation:
    fields.choice("version", "gemm", "GEMM")
    bits = fields.choice("bits" if "w_bit" not in fields.values else "w_bit", 4)
    fields.choice("zero_point", True)
    group = fields.group_size("group_size" if "q_group_size" not in fields.values else "q_group_size")
    form = WeightFormat("AWQ", "awq", bits=bits, has_zero_points=True, scale_bytes=2, group_size=group)
    ignored = ("lm_head", *fields.names("modules_to_not_convert"))
    return Quantisation("awq", (((_EVERY_LINEAR,), form),), ignored, ignores_any_part=True)


def _gptq(fields: _Settings) -> Quantisation:
    bits = fields.choice("bits", 4, 8)
    version = fields.choice("checkpoint_format", "gptq", "gptq_v2")
    fields.choice("lm_head", False)
    fields.boolean("sym", True)
    form = WeightFormat(
        "GPTQ",
        "gptq",
        bits=bits,
        scale_bytes=2,
        has_zero_points=True,
        group_size=fields.group_size("group_size"),
        has_group_index=fields.boolean("desc_act", False),
        zero_point_offset=1 if version == "gptq" else 0,
    )
    every = _of_every_layer("gptq", form, fields)
    every = replace(every, ignored=(*every.ignored, *_exceptions(fields)))
    listed = fields.nested_names("modules_in_block_to_quantize")
    if not listed:
        return every
    # They are named as within a layer; what is not listed is not quantised.
    target = rf"re:.*\.(?:{'|'.join(map(re.escape, listed))})$"
    return replace(every, formats=(((target,), form),))


def _exceptions(fields: _Settings) -> tuple[str, ...]:
    """Return the layers that `dynamic` of GPTQModel leaves as they are: expressions after `-:`."""
    if not fields.get("dynamic"):
        return ()
    entries = fields.inner("dynamic").values
    if not all(entry.startswith("-:") for entry in entries):
        raise fields.unsupported("dynamic", "one format for all quantised layers ('-:' names the others)")
    found = [f"re:{entry.removeprefix('-:')}" for entry in entries]
    return _Settings({"dynamic": found}, fields.path).names("dynamic")


def _mxfp4(fields: _Settings) -> Quantisation:
    for entry in fields.names("modules_to_not_convert"):
        # Entries name modules by patterns; those of experts, or of the MLP around them, would leave some as they are.
        of_any_layer = ".*".join(re.escape(part) for part in re.split(r"\d+|\*", entry))
        if "experts" in entry or re.search(of_any_layer, _EXPERTS):
            raise fields.unsupported("modules_to_not_convert", "all experts in MXFP4")
    return Quantisation("mxfp4", (((f"re:{_EVERY_EXPERT}",), MXFP4),))


def _of_every_layer(method: str, form: WeightFormat, fields: _Settings) -> Quantisation:
    """Return the description of a method that has one format, and never quantises the output head."""
    # vLLM calls them ignored layers.
    listed = (*fields.names("modules_to_not_convert"), *fields.names("ignored_layers"))
    ignored = ("lm_head", *(one.strip(".") for one in listed))
    return Quantisation(method, (((_EVERY_LINEAR,), form),), ignored, ignores_parts=True)


_METHODS = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fine_grained_fp8,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
LINEAR_METHODS = ("compressed-tensors", "fp8", "awq", "gptq")
"""Methods of models whose tensors are those of single linears: dense ones, and experts with tensors of their own."""
