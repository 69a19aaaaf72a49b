"""Constructors that make messages in a fourth of the time, for decisions that make dozens.

A frozen dataclass sets each field by name through `object`, which for a `Step` takes as long as a large part of
the decision behind it. Here a message is made as an object of a twin class, which has the same slots and is not
frozen. Once its fields are set, its class is changed to the frozen one. The result is the same: class, equality
and hash are as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, field, fields, make_dataclass
from typing import Any, ParamSpec, TypeVar

from medha.wire.messages import Admit, Done, Emit, Extent, Sample, StageFree, Step, StepEntry

_Arguments = ParamSpec("_Arguments")
_Kind = TypeVar("_Kind")


def _quick(kind: Callable[_Arguments, _Kind]) -> Callable[_Arguments, _Kind]:
    """Return a constructor of messages of `kind`, a frozen dataclass with slots, with the same arguments."""
    declared: Any = kind
    columns: list[Any] = []
    for one in fields(declared):
        default = field() if one.default is MISSING else field(default=one.default)
        assert one.default_factory is MISSING
        columns.append((one.name, Any, default))

    def freeze(message: Any) -> None:
        message.__class__ = kind

    twin: Any = make_dataclass(
        declared.__name__, columns, namespace={"__post_init__": freeze}, slots=True, eq=False, repr=False
    )
    return twin  # type: ignore[no-any-return]


new_step = _quick(Step)
new_entry = _quick(StepEntry)
new_extent = _quick(Extent)
new_admit = _quick(Admit)
new_emit = _quick(Emit)
new_sample = _quick(Sample)
new_stage_free = _quick(StageFree)
new_done = _quick(Done)


class StepEntryDraft:
    """Becomes a `StepEntry` once all of its fields, and then its class, are set; avoids the two calls of `new_entry`.

    Used for the hundreds of decodes in a step.
    """

    __slots__ = ("extents", "id", "lane", "samples", "shard_map_version", "strategy")
    id: str
    lane: int
    extents: tuple[Extent, ...]
    samples: bool
    strategy: str
    shard_map_version: int


def decode_entry(id_: str, lane: int, position: int) -> StepEntry:
    """Return the entry of a sequence that decodes the token at `position` on one lane."""
    return new_entry(id_, lane, (new_extent(position, 1),), True)
