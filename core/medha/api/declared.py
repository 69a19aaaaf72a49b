"""The models that manifests name for a router, as data and as text.

The operator and `medha up` write the text, routers read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from medha.errors import ConfigInvalid

AUTO = "auto"
"""The value of a setting that leaves the choice to the checkpoint."""


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
    aliases: tuple[Annotated[str, Field(min_length=1, max_length=253)], ...] = ()
    """Further names that clients may ask for."""
    tool_call_format: str = AUTO
    """The form of its calls of functions; a router takes one that it does not know for `auto`."""
    reasoning_format: str = AUTO
    """The form of its thoughts, in the same way."""


class _Document(_DeclaredReplica):
    models: tuple[DeclaredModel, ...] = ()


def merged(models: Iterable[DeclaredModel]) -> tuple[DeclaredModel, ...]:
    """Return one entry per name, sorted: replicas add up, service classes keep the order of their first occurrence.

    Of several forms of calls or of thoughts, the first that is not `auto` counts.
    """
    found: dict[str, DeclaredModel] = {}
    for model in models:
        known = found.get(model.name, DeclaredModel(name=model.name))
        classes = tuple(dict.fromkeys((*known.service_classes, *model.service_classes)))
        replicas = known.replicas + model.replicas
        aliases = tuple(sorted({*known.aliases, *model.aliases}))
        found[model.name] = DeclaredModel(
            name=model.name,
            service_classes=classes,
            replicas=replicas,
            aliases=aliases,
            tool_call_format=_first(known.tool_call_format, model.tool_call_format),
            reasoning_format=_first(known.reasoning_format, model.reasoning_format),
        )
    return tuple(found[name] for name in sorted(found))


def _first(*formats: str) -> str:
    return next((one for one in formats if one != AUTO), AUTO)


def usable_aliases(models: Iterable[DeclaredModel]) -> tuple[dict[str, str], list[str]]:
    """Return the aliases as alias -> model, and one sentence for each alias that cannot be used.

    `models` is merged. An alias cannot be used if it is a model's name, or if two models have it.
    """
    models = tuple(models)
    names = {model.name for model in models}
    claims: dict[str, list[str]] = {}
    for model in models:
        for alias in model.aliases:
            claims.setdefault(alias, []).append(model.name)
    problems = []
    usable = {}
    for alias, claimants in sorted(claims.items()):
        if alias in names:
            problems.append(f"model {claimants[0]!r} has the alias {alias!r}, which is the name of a model")
        elif len(claimants) > 1:
            problems.append(f"the models {' and '.join(map(repr, claimants))} have the same alias {alias!r}")
        else:
            usable[alias] = claimants[0]
    return usable, problems


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
