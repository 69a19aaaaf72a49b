"""Output token ids of running requests, kept for those that step aside and compute their KV again."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from medha.wire.frames import TokenIds


class OutputIds:
    """Ids of the tokens that requests have emitted since they were last admitted: four bytes for each."""

    def __init__(self) -> None:
        self._outputs: dict[str, array[int]] = {}

    def __len__(self) -> int:
        return len(self._outputs)

    def add(self, request_id: str, ids: Iterable[int]) -> None:
        """Append output tokens of a request."""
        output = self._outputs.get(request_id)
        if output is None:
            output = self._outputs[request_id] = array("i")
        output.extend(ids)

    def take(self, request_id: str) -> TokenIds:
        """Return the ids of a request, int32 [n], and forget them."""
        return np.array(self._outputs.pop(request_id, array("i")), dtype=np.int32)

    def end(self, request_id: str) -> None:
        """Forget a request; does nothing if it has emitted nothing."""
        self._outputs.pop(request_id, None)
