"""Joins the log-probabilities of a prompt, which ranks report chunk by chunk, and in a ring lane by lane."""

from __future__ import annotations

from collections.abc import Iterable

from medha.wire.messages import Extent, PromptLogprobs


def joined(parts: Iterable[PromptLogprobs], prompt_length: int) -> PromptLogprobs | None:
    """Return the log-probabilities of the tokens at positions 1 .. `prompt_length`, in order; None if one is missing."""
    found: dict[int, tuple[PromptLogprobs, int]] = {}
    for part in parts:
        positions = (
            position
            for extent in part.extents
            for position in range(extent.start, extent.last + 1, extent.stride)
        )
        found.update((position, (part, index)) for index, position in enumerate(positions))
    if any(position not in found for position in range(1, prompt_length)):
        return None
    ordered = [found[position] for position in range(1, prompt_length)]
    logprobs: list[float] = []
    ranks: list[int] = []
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    for part, index in ordered:
        logprobs.append(part.logprobs[index])
        ranks.append(part.ranks[index])
        first, last = index * part.alternatives, (index + 1) * part.alternatives
        top_ids += part.top_ids[first:last]
        top_logprobs += part.top_logprobs[first:last]
    extents = (Extent(1, prompt_length - 1),) if prompt_length > 1 else ()
    return PromptLogprobs(extents, tuple(logprobs), tuple(ranks), tuple(top_ids), tuple(top_logprobs))
