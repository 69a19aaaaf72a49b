"""The linears of a decoder's layers: their names in a checkpoint, their shapes, and the memory that they take.

Names are those of Hugging Face's files, without `.weight`. The output head is not among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from medha.model.latent_shape import LatentShape
from medha.model.quantisation import Quantisation, WeightFormat

Shape = tuple[int, int]
"""Rows and columns of a weight."""

HEADS_UP = "kv_b_proj"
"""The linear of latent attention that queries and results absorb: ranks hold its numbers, whatever its format is."""
_REORDERED = (".q_proj", ".q_b_proj", ".kv_a_proj_with_mqa")
"""Linears of latent attention whose rows ranks hold in another order, with the block of each row."""
_ROW_INDEX_BYTES = 4
_LATENT_QUERIES = ".q_b_proj"
"""The linear after the first product of latent attention that is held in its format, as it is stored."""
_HALF_BYTES = 2


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names within a sparse layer: the block, and the three linears of an expert."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def of_expert(self, layer: str, expert: int) -> tuple[str, str, str]:
        """Return the names of gate, up and down of one expert; `layer` ends with a dot."""
        return self._linears(f"{layer}{self.block}.experts.{expert}.")

    def of_shared(self, layer: str) -> tuple[str, str, str]:
        """Return those of the experts that every token passes, which are one MLP."""
        return self._linears(f"{layer}{self.block}.shared_experts.")

    def _linears(self, prefix: str) -> tuple[str, str, str]:
        return f"{prefix}{self.gate}", f"{prefix}{self.up}", f"{prefix}{self.down}"


@dataclass(frozen=True, slots=True)
class SparseBlock:
    """The experts of a model.

    Attributes:
        layers: Indexes of the layers that have them in place of an MLP.
        count: Experts of a layer.
        intermediate: Width of one.
        shared_intermediate: Width of the MLP that every token passes beside them; 0 if there is none.
        names: Names of their linears; None if one tensor holds those of all experts.
    """

    layers: frozenset[int]
    count: int
    intermediate: int
    shared_intermediate: int = 0
    names: ExpertNames | None = None


@dataclass(frozen=True, slots=True)
class LinearSizes:
    """The sizes that the linears of a model's layers follow from.

    Attributes:
        layers: Number of layers.
        hidden: Width of hidden states.
        query_heads: Number of query heads; only latent attention needs it.
        query_width, kv_width: Widths of the queries, and of the keys, of all heads.
        intermediate: Width of the MLP of dense layers.
        latent: The sizes of latent attention, which has other linears.
        sparse: The experts; None if all layers are dense.
    """

    layers: int
    hidden: int
    query_heads: int
    query_width: int
    kv_width: int
    intermediate: int
    latent: LatentShape | None = None
    sparse: SparseBlock | None = None

    def shared(self, index: int) -> dict[str, Shape]:
        """Return the linears of a layer that every token passes, by name; routers are not among them."""
        layer = f"model.layers.{index}."
        found = self._attention(f"{layer}self_attn.")
        if self.sparse is None or index not in self.sparse.layers:
            return found | self._mlp(ExpertNames()._linears(f"{layer}mlp."), self.intermediate)
        if self.sparse.names is not None and self.sparse.shared_intermediate:
            found |= self._mlp(self.sparse.names.of_shared(layer), self.sparse.shared_intermediate)
        return found

    def of_experts(self, index: int) -> dict[str, Shape]:
        """Return the linears of a layer's experts by name; none if the layer is dense, or if one tensor holds them all."""
        found: dict[str, Shape] = {}
        sparse = self.sparse
        if sparse is not None and sparse.names is not None and index in sparse.layers:
            for expert in range(sparse.count):
                names = sparse.names.of_expert(f"model.layers.{index}.", expert)
                found |= self._mlp(names, sparse.intermediate)
        return found

    @property
    def split_inputs(self) -> frozenset[str]:
        """Last parts of the names of linears whose inputs tensor ranks split."""
        down = {ExpertNames().down}
        if self.sparse is not None and self.sparse.names is not None:
            down.add(self.sparse.names.down)
        return frozenset({"o_proj", *down})

    def _attention(self, attention: str) -> dict[str, Shape]:
        latent, hidden = self.latent, self.hidden
        if latent is None:
            return {
                f"{attention}q_proj": (self.query_width, hidden),
                f"{attention}k_proj": (self.kv_width, hidden),
                f"{attention}v_proj": (self.kv_width, hidden),
                f"{attention}o_proj": (hidden, self.query_width),
            }
        heads, queries = self.query_heads, self.query_heads * latent.query_dim
        found = {f"{attention}q_proj": (queries, hidden)}
        if latent.query_rank:
            found = {
                f"{attention}q_a_proj": (latent.query_rank, hidden),
                f"{attention}q_b_proj": (queries, latent.query_rank),
            }
        return found | {
            f"{attention}kv_a_proj_with_mqa": (latent.row_dim, hidden),
            f"{attention}{HEADS_UP}": (heads * (latent.plain_dim + latent.value_dim), latent.kv_rank),
            f"{attention}o_proj": (hidden, heads * latent.value_dim),
        }

    def _mlp(self, names: tuple[str, str, str], width: int) -> dict[str, Shape]:
        gate, up, down = names
        return {gate: (width, self.hidden), up: (width, self.hidden), down: (self.hidden, width)}

    def held_bytes(self, layer: str, shape: Shape, form: WeightFormat | None, element_bytes: int) -> int:
        """Return the memory that ranks take together for a linear; `element_bytes` are those of a number.

        In 16 bits they hold it in the form that a GPU's units take, but for experts and what is after the first product of latent
        attention (`medha_worker.kernels.fast_forms`). A device without such units takes a little less.
        """
        rows, columns = shape
        if form is None or layer.endswith(f".{HEADS_UP}"):
            return rows * columns * element_bytes
        has_blocks = form.block_rows not in (None, 1)
        is_reordered = self.latent is not None and has_blocks and layer.endswith(_REORDERED)
        is_for_device_units = (
            element_bytes == _HALF_BYTES
            and not is_reordered
            and ".experts." not in layer
            and not layer.endswith(_LATENT_QUERIES)
        )
        held = form.held_bytes(rows, columns, element_bytes, is_for_device_units=is_for_device_units)
        return held + is_reordered * rows * _ROW_INDEX_BYTES

    def mean_bytes(self, quantisation: Quantisation | None, element_bytes: int) -> float | None:
        """Return the mean bytes of a weight that every token passes, scales included; None if nothing is quantised.

        Routers, which are never quantised, count.
        """
        if quantisation is None:
            return None
        linears = (one for index in range(self.layers) for one in self.shared(index).items())
        routers = 0 if self.sparse is None else len(self.sparse.layers) * self.sparse.count * self.hidden
        return self._mean(linears, quantisation.format_of, element_bytes, routers)

    def mean_expert_bytes(self, quantisation: Quantisation | None, element_bytes: int) -> float | None:
        """Return the mean bytes of a weight of experts, scales included; None if nothing, or no joint tensor, is quantised."""
        if quantisation is None or self.sparse is None or not self.sparse.layers:
            return None
        if self.sparse.names is None:
            return quantisation.joint_expert_bytes(self.hidden, self.sparse.intermediate)
        linears = (one for index in self.sparse.layers for one in self.of_experts(index).items())
        return self._mean(linears, quantisation.format_of, element_bytes)

    def _mean(
        self,
        linears: Iterator[tuple[str, Shape]],
        format_of: Callable[[str], WeightFormat | None],
        element_bytes: int,
        plain: int = 0,
    ) -> float:
        """Return the mean bytes of the weights of linears, and of `plain` ones that are not quantised."""
        total, count = plain * element_bytes, plain
        for layer, shape in linears:
            total += self.held_bytes(layer, shape, format_of(layer), element_bytes)
            count += shape[0] * shape[1]
        return total / count
