"""The models that manifests name for a router, as data and as text.

The operator and `medha up` write the text, routers read it.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from medha.errors import ConfigInvalid


class _DeclaredReplica(BaseModel):
    """Common settings: camelCase outside, frozen; fields of a newer release are ignored."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="ignore",
        use_attribute_docstrings=True,
    )


class DeclaredModel(_DeclaredReplica):
    """A model, over all replicas that serve it through one router."""

    name: str = Field(min_length=1, max_length=253)
    """The name that clients ask for."""
    service_classes: tuple[str, ...] = ()
    """Names of its service classes; the first is the default one."""
    replicas: int = Field(default=0, ge=0)
    """Replicas that should serve by now: neither suspended nor still within the time of their first start."""


class _Document(_DeclaredReplica):
    models: tuple[DeclaredModel, ...] = ()


def merged(models: Iterable[DeclaredModel]) -> tuple[DeclaredModel, ...]:
    """Return one entry per name, sorted: replicas add up, service classes keep the order of their first occurrence."""
    found: dict[str, DeclaredModel] = {}
    for model in models:
        known = found.get(model.name, DeclaredModel(name=model.name))
        classes = tuple(dict.fromkeys((*known.service_classes, *model.service_classes)))
        replicas = known.replicas + model.replicas
        found[model.name] = DeclaredModel(name=model.name, service_classes=classes, replicas=replicas)
    return tuple(found[name] for name in sorted(found))


def to_text(models: Iterable[DeclaredModel]) -> str:
    """Return the models as JSON; the same models give the same bytes."""
    return _Document(models=merged(models)).model_dump_json(by_alias=True, indent=1) + "\n"


def from_text(text: str | bytes, where: str) -> tuple[DeclaredModel, ...]:
    """Return the models of a text, which `where` names in errors.

    Raises:
        ConfigInvalid: the text is invalid; names the field, its value and what was expected.
    """
    try:
        return merged(_Document.model_validate_json(text).models)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the text"
        given = repr(first["input"])[:80]
        raise ConfigInvalid(
            f'{where}: {field} is {given}: {first["msg"]}; expected {{"models": [{{"name": ...}}]}}'
        ) from error
