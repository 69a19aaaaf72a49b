"""The type of options that give numbers of bytes in Kubernetes' notation."""

from __future__ import annotations

from typing import Any

import click
from pydantic import TypeAdapter, ValidationError

from medha.api.fields import Quantity, quantity_bytes

_QUANTITY = TypeAdapter[str](Quantity)


class Bytes(click.ParamType[int]):
    """A number of bytes above 0 in Kubernetes' notation: 64Gi."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            size = quantity_bytes(_QUANTITY.validate_python(value))
        except ValidationError:
            size = 0
        if size == 0:
            self.fail(f"{value!r} is no number of bytes above 0; write 64Gi, 500M or 1Ti", param, ctx)
        return size
