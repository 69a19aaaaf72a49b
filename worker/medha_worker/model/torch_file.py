"""The tensors of a file that `torch.save` wrote, such as `pytorch_model.bin`: mapped from it, and nothing in it is run."""

from __future__ import annotations

from pathlib import Path

import torch

from medha.errors import CheckpointInvalid
from medha_worker.device import HOST, is_in_host_memory

_FORMS = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.int32: "I32",
    torch.bool: "BOOL", torch.uint8: "U8",
}  # fmt: skip


def read_torch_file(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file by name; their memory is that of the file.

    Such a file is a pickle, which could run any code. Only what makes up tensors and plain values is read.

    Raises:
        CheckpointInvalid: the file is damaged, has the form from before torch 1.6, or holds anything but tensors.
    """
    as_safetensors = "save its tensors as model.safetensors"
    try:
        found = torch.load(path, map_location=HOST, mmap=True, weights_only=True)
    except Exception as error:  # a damaged file raises any of a dozen types
        if str(error).startswith("Weights only load failed"):  # its text advises to run what the file holds
            raise CheckpointInvalid(
                f"{path}: holds something other than tensors, which is not read, or is damaged; {as_safetensors}"
            ) from error
        first = (str(error).splitlines() or [""])[0][:200]
        raise CheckpointInvalid(
            f"{path}: is no complete file of torch.save ({type(error).__name__}: {first}); fetch it again, or {as_safetensors}"
        ) from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(one, torch.Tensor) and _has_values(one)
        for name, one in found.items()
    ):
        raise CheckpointInvalid(f"{path}: holds something other than tensors by name; {as_safetensors}")
    return {name: one.detach() for name, one in found.items()}


def _has_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values are in host memory, each at its place."""
    return is_in_host_memory(tensor) and tensor.layout == torch.strided


def stored_form(tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
    """Return the shape of a tensor, and its number format by the name that safetensors has for it."""
    return tuple(tensor.shape), _FORMS.get(tensor.dtype, str(tensor.dtype))
