"""The building blocks of the manifest's models: spelling, quantities, and marks of fields.

A field's description gives its unit, its default's reason and, in `x-apply`, whether a change is applied
`live`, with the next `epoch` or by a `restart`. A rule over several fields is written twice, side by side: as
a validator, for readers of manifests without a cluster, and as CEL in `x-kubernetes-validations`, for the API
server.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic.alias_generators import to_camel

_UNITS_BYTES = {
    "": 1, "m": 1e-3,
    "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50,
}  # fmt: skip

_UNWRITTEN = ("string_type", "string_pattern_mismatch", "string_too_short")


def written_as(words: str) -> WrapValidator:
    """Return a validator that says in `words` how a text is written, where pydantic would show a pattern, a type or a length."""

    def checked(value: object, check: ValidatorFunctionWrapHandler) -> object:
        try:
            return check(value)
        except ValidationError as error:
            if any(problem["type"] not in _UNWRITTEN for problem in error.errors()):
                raise
            raise ValueError(words) from error

    return WrapValidator(checked)


_QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(k|M|G|T|Ki|Mi|Gi|Ti)?$"
_A_SIZE = (
    "must be a size; write a number with Ki, Mi, Gi or Ti, such as 16Gi, or a plain number of bytes in quotes"
)
Quantity = Annotated[
    str, Field(pattern=_QUANTITY_PATTERN, max_length=24, examples=["2Gi"]), written_as(_A_SIZE)
]
"""Bytes in Kubernetes' notation."""

ENDPOINT_PATTERN = r"^https?://[^\s/?#@]+(/[^\s?#]*)?$"
"""Base URL of a collector of traces; credentials belong into headers, not here."""


def quantity_bytes(quantity: str) -> int:
    """Return the bytes of a Kubernetes quantity such as `512Mi`."""
    number = quantity.rstrip("mkKMGTPi")
    return int(float(number) * _UNITS_BYTES[quantity[len(number) :]])


def _above_zero(quantity: str) -> str:
    if quantity_bytes(quantity) == 0:
        raise ValueError("must be above 0; give bytes such as 16Gi, or leave out what it is for")
    return quantity


QuantityAboveZero = Annotated[Quantity, AfterValidator(_above_zero)]
"""Bytes in Kubernetes' notation, or bytes per second, that cannot be 0; the field needs the rules `SIZE_RULES`."""
SIZE_RULES = (
    (f"self.matches(r'{_QUANTITY_PATTERN}')", _A_SIZE),
    ("self.matches('[1-9]')", "must be above 0"),
)


def _number_as_text(value: object) -> object:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


_RESOURCE_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
ResourceQuantity = Annotated[
    str,
    BeforeValidator(_number_as_text),
    Field(
        pattern=_RESOURCE_PATTERN,
        max_length=24,
        # Pydantic omits the pattern from the schema of a type with a validator before it.
        json_schema_extra={"x-kubernetes-int-or-string": True, "pattern": _RESOURCE_PATTERN, "minimum": 0},
    ),
    written_as("must be an amount; write a number such as 2, 500m or 32Gi"),
]
"""An amount of a pod's resource in Kubernetes' notation: `500m` cores, `32Gi`, or a bare number."""

Name = Annotated[
    str,
    Field(
        min_length=1,
        max_length=253,
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
    ),
    written_as(
        "must be the name of a Kubernetes object: lower-case letters, digits, `-` and `.`, with a letter or digit at each end"
    ),
]
"""Name of a Kubernetes object: a DNS subdomain."""

AbsolutePath = Annotated[
    str,
    Field(min_length=1, max_length=1024, pattern=r"^/"),
    written_as("must be an absolute path; begin it with /"),
]
"""Path of a directory of a node."""

HostName = Annotated[
    str,
    Field(max_length=253, pattern=r"^[A-Za-z0-9]([-A-Za-z0-9._]*[A-Za-z0-9])?$|^[0-9A-Fa-f:]+$"),
    written_as("must be a name or address alone, such as chat.example or ::1, without scheme and port"),
]
"""Name or address in a `Host` header, without a port."""

Origin = Annotated[
    str,
    Field(max_length=512, pattern=r"^([A-Za-z][-+.A-Za-z0-9]*://[^/\s]+|\*)$"),
    written_as("must be an origin such as https://chat.example:8443, without a path, or *"),
]
"""Scheme, host and port of a web page, as browsers send them in `Origin`; or `*`."""

Label = Annotated[str, Field(max_length=63, pattern=r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$")]
"""Value of a Kubernetes label."""


def live() -> dict[str, Any]:
    """Return the mark of a field whose change reaches a running replica."""
    return {"x-apply": "live"}


def epoch() -> dict[str, Any]:
    """Return the mark of a field whose change ends the present epoch and reaches a running replica with the next."""
    return {"x-apply": "epoch"}


def restart() -> dict[str, Any]:
    """Return the mark of a field whose change replaces the replica's pods."""
    return {"x-apply": "restart"}


def rules(*pairs: tuple[str, str]) -> dict[str, Any]:
    """Return CEL rules, each with its message, as the API server checks them on the object that holds them."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in pairs]}


class Model(BaseModel):
    """Common settings of every model of the manifest: camelCase outside, frozen, no unknown fields."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )
