"""The data types that `spec.kvCache.dtype` may ask for, and the bytes of a key's or value's number in each."""

from __future__ import annotations

from typing import Literal

KvDtype = Literal["auto", "fp8"]
"""`auto`: that of the model; `fp8`: float8 (E4M3), with scales."""


def kv_element_bytes(dtype: KvDtype, model_element_bytes: int) -> int:
    """Return the bytes of one number of a key or value; the scales, one for each head and layer, are negligible."""
    return 1 if dtype == "fp8" else model_element_bytes
