"""`spec.model` of a replica: its name, its checkpoint, and the forms of its calls and thoughts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from medha.api.cluster import HostPathSource, HuggingFaceSource, ImageSource, PersistentVolumeSource
from medha.api.fields import Model, live, restart, rules

_SOURCES = ("path", "huggingFace", "pvc", "hostPath", "image")


class ModelSource(Model):
    """Source of the checkpoint; exactly one field must be set."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"[{', '.join(f'has(self.{name})' for name in _SOURCES)}].filter(given, given).size() == 1",
                f"model.source needs exactly one of {', '.join(_SOURCES)}",
            )
        )
    )

    path: str | None = Field(default=None, min_length=1, max_length=1024)
    """Directory of a Hugging Face checkpoint: relative to the manifest's folder for `medha up`, a
    directory of the pod's image in a cluster."""
    hugging_face: HuggingFaceSource | None = None
    pvc: PersistentVolumeSource | None = None
    host_path: HostPathSource | None = None
    image: ImageSource | None = None

    @model_validator(mode="after")
    def _one_source(self) -> ModelSource:
        given = [
            name
            for name, value in zip(
                _SOURCES, (self.path, self.hugging_face, self.pvc, self.host_path, self.image), strict=True
            )
            if value is not None
        ]
        if not given:
            raise ValueError("names no source; set `path` to a checkpoint directory")
        if len(given) > 1:
            raise ValueError(f"names {' and '.join(given)}; keep one of them")
        return self


_DRAFT_SOURCES = ("path", "pvc", "image")
_ONE_DRAFT_SOURCE = (
    f"the checkpoint that drafts needs exactly one of {', '.join(_DRAFT_SOURCES)}; name where it lies"
)


class DraftSource(Model):
    """Source of the checkpoint of a draft model or of a prediction head; exactly one field must be set."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"[{', '.join(f'has(self.{name})' for name in _DRAFT_SOURCES)}].filter(given, given).size() == 1",
                _ONE_DRAFT_SOURCE,
            )
        )
    )

    path: str | None = Field(default=None, min_length=1, max_length=1024)
    """Directory of a Hugging Face checkpoint: relative to the manifest's folder for `medha up`, a
    directory of the pod's image in a cluster."""
    pvc: PersistentVolumeSource | None = None
    image: ImageSource | None = None

    @model_validator(mode="after")
    def _one_source(self) -> DraftSource:
        given = [name for name in _DRAFT_SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"{_ONE_DRAFT_SOURCE} (found {' and '.join(given) or 'none'})")
        return self


class Architecture(Model):
    """Sizes from the checkpoint's `config.json`. If they are given, a grid that cannot work is refused
    when the resource is applied."""

    layers: int = Field(ge=1, le=100_000)
    """Number of transformer layers, `num_hidden_layers`."""
    query_heads: int = Field(ge=1, le=100_000)
    """Number of query heads in each layer, `num_attention_heads`."""


MOST_ALIASES = 32
ToolCallFormat = Literal["auto", "hermes", "llama3_json", "mistral", "mistral_args", "qwen3_coder", "harmony"]

ReasoningFormat = Literal["auto", "none", "think", "mistral", "harmony"]


class ModelSpec(Model):
    """The model that is served."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("!has(self.aliases) || !(self.name in self.aliases)", "model.aliases has the model's own name"),
        )
    )

    name: str = Field(min_length=1, max_length=253, json_schema_extra=restart())
    """Name that clients request in `model` and that `/v1/models` lists."""
    aliases: tuple[Annotated[str, Field(min_length=1, max_length=253)], ...] = Field(
        default=(), max_length=MOST_ALIASES, json_schema_extra=live() | {"x-kubernetes-list-type": "set"}
    )
    """Further names that clients may request. Answers have the model's own name. No alias may be the name of
    another model, or an alias of one, behind the same router."""
    tool_call_format: ToolCallFormat = Field(default="auto", json_schema_extra=live())
    """Form in which the model writes calls of functions. `auto` finds it from the checkpoint's chat template;
    docs/tool-calls.md lists the others."""
    reasoning_format: ReasoningFormat = Field(default="auto", json_schema_extra=live())
    """Form in which the model writes its thoughts, which clients get apart from the answer. `auto` finds it from the
    checkpoint's chat template, `none` separates no thoughts; docs/reasoning.md lists the others."""
    source: ModelSource = Field(json_schema_extra=restart())
    max_model_len: int | None = Field(default=None, ge=16, le=2**31 - 1, json_schema_extra=restart())
    """Largest number of tokens of a prompt plus its output. Default: the checkpoint's
    `max_position_embeddings`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", json_schema_extra=restart()
    )
    """Data type of weights, activations and KV. `auto` uses the checkpoint's own."""
    rope_scaling: dict[str, Any] | None = Field(default=None, json_schema_extra=restart())
    """RoPE scaling that replaces the checkpoint's, in Hugging Face's spelling (`rope_type`, `factor`,
    ...)."""
    architecture: Architecture | None = Field(default=None, json_schema_extra=restart())
    """Sizes from the checkpoint's `config.json`, for checks when the resource is applied. Default: read
    from the checkpoint when the ranks start."""

    @model_validator(mode="after")
    def _names_differ(self) -> ModelSpec:
        twice = sorted({name for name in self.aliases if self.aliases.count(name) > 1})
        if twice:
            raise ValueError(f"aliases names {twice} twice; keep one of each")
        if self.name in self.aliases:
            raise ValueError(f"aliases has {self.name!r}, which is the model's own name; remove it")
        return self
