"""The kernels that a device runs a model with, besides the matrix products, which are torch's everywhere."""

from dataclasses import dataclass, field

from medha_worker.kernels.torch_attention import AttentionBackend, TorchAttention
from medha_worker.kernels.torch_rows import RowOperators, TorchRows


@dataclass(frozen=True)
class Kernels:
    """Implementations of a model's operators; plain torch by default."""

    attention: AttentionBackend = field(default_factory=TorchAttention)
    rows: RowOperators = field(default_factory=TorchRows)
