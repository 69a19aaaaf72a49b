"""Joins the reports of the lanes that run a step together into one event."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import isfinite

from medha.wire.messages import Done, EntryFailed, StageFree, Step
from medha_worker.timeouts import bound_seconds


class LockStep:
    """Joins the reports of lanes that run a step together; those of a one-lane step pass through."""

    def __init__(self) -> None:
        self._steps: dict[int, Step] = {}  # in flight
        self._free: dict[int, set[int]] = {}  # by step: lanes whose stage 0 is done with it
        self._done: dict[int, list[Done]] = {}
        self._due: dict[int, float] = {}  # by step: when it must have ended
        self._ran_out: dict[int, set[int]] = {}  # by step: ranks that had too little memory for it
        self._last = -1  # id of the last step that was sent

    def expect(self, step: Step, now: float) -> None:
        """Register a step that is sent to the ranks, after those in flight."""
        self._steps[step.step_id] = step
        self._last = step.step_id
        self._due[step.step_id] = now + bound_seconds(
            sum(one.predicted_seconds for one in self._steps.values())
        )

    @property
    def is_idle(self) -> bool:
        return not self._steps

    def overdue(self, now: float) -> int | None:
        """Return the id of a step that has not ended within its bound, or None."""
        return next((step_id for step_id, due in self._due.items() if now > due), None)

    def contradiction(self, part: StageFree | Done, epoch: int, vocab_size: int) -> str | None:
        """Return how a report contradicts the steps that were sent, or None; late duplicates do not."""
        if part.epoch != epoch:
            return f"a report of epoch {part.epoch} in epoch {epoch}"
        step = self._steps.get(part.step_id)
        if step is None:
            return None if 0 <= part.step_id <= self._last else f"step {part.step_id} was never sent"
        if not part.lanes or not set(part.lanes) <= set(step.lanes):
            return f"lanes {part.lanes} of step {part.step_id}, which runs on {step.lanes}"
        if isinstance(part, StageFree):
            return None if part.stage == 0 else f"stage {part.stage} does not report when it is free"
        for seconds in (part.compute_seconds, part.copy_seconds):
            if not (isfinite(seconds) and seconds >= 0):
                return f"step {part.step_id} took {seconds} seconds"
        if not 0 <= part.draft_seconds <= part.compute_seconds:
            return f"step {part.step_id} drafted for {part.draft_seconds} of {part.compute_seconds} seconds"
        if set(part.lanes) & {lane for one in self._done.get(part.step_id, ()) for lane in one.lanes}:
            return f"step {part.step_id} is done already on lanes {part.lanes}"
        strange = _strange_samples(part, step, vocab_size)
        if strange is not None:
            return f"step {part.step_id} {strange}"
        running = {entry.id for entry in step.entries}
        if not running.issuperset(failure.id for failure in part.failures):
            return f"step {part.step_id} does not run all of {[one.id for one in part.failures][:8]}"
        strange = _strange_logprobs(part, running, vocab_size)
        if strange is not None:
            return f"step {part.step_id}: {strange}"
        if part.block_hashes:
            return "ranks may not send block hashes"
        strange = _strange_drafts(part, step, vocab_size)
        return None if strange is None else f"step {part.step_id}: {strange}"

    def unsampled(self, part: Done) -> list[str]:
        """Return the requests that have neither a token nor a failure when a step ends with `part`.

        They would wait for ever. A failure may come from another lane than the one that samples, so the
        reports of all lanes are checked when the last one comes; until then the list is empty. `part` must
        have passed `contradiction`.
        """
        step = self._steps.get(part.step_id)
        parts = [*self._done.get(part.step_id, ()), part]
        if step is None or {lane for one in parts for lane in one.lanes} != set(step.lanes):
            return []
        reported = {sample.id for one in parts for sample in one.samples}
        reported |= {failure.id for one in parts for failure in one.failures}
        return [entry.id for entry in step.entries if entry.samples and entry.id not in reported]

    def ran_out(self, step_id: int, rank: int) -> None:
        """Note that a rank had too little memory for some rows of a step.

        Other ranks see NaN in these rows.
        """
        if step_id in self._steps:
            self._ran_out.setdefault(step_id, set()).add(rank)

    def _explained(self, failure: EntryFailed, ranks: Collection[int]) -> EntryFailed:
        if failure.reason != "not_finite" or not ranks:
            return failure
        detail = (
            f"rank {', '.join(map(str, sorted(ranks)))} had too little memory for its part of this request; its log says for "
            "how many tokens at once (scheduling.maxChunkTokens bounds them)"
        )
        return replace(failure, reason="out_of_memory", detail=detail)

    def join(self, part: StageFree | Done) -> StageFree | Done | None:
        """Return the event of all lanes once the last one has reported, else None.

        Late duplicates are ignored.
        """
        step = self._steps.get(part.step_id)
        if step is None:
            return None
        lanes = step.lanes
        if isinstance(part, StageFree):
            free = self._free.setdefault(part.step_id, set())
            free.update(part.lanes)
            if free != set(lanes):
                return None
            del self._free[part.step_id]
            return replace(part, lanes=lanes)
        parts = self._done.setdefault(part.step_id, [])
        parts.append(part)
        if {lane for one in parts for lane in one.lanes} != set(lanes):
            return None
        for of_step in (self._done, self._steps, self._due):
            del of_step[part.step_id]
        self._free.pop(part.step_id, None)
        ranks = self._ran_out.pop(part.step_id, ())
        # The layers may take longest on one lane, and the draft model on another. The controller subtracts the draft model's
        # time, and what is left has to be that of the layers.
        draft_seconds = max(one.draft_seconds for one in parts)
        layers_seconds = max(one.compute_seconds - one.draft_seconds for one in parts)
        return Done(
            step_id=part.step_id,
            samples=tuple(sample for one in parts for sample in one.samples),
            failures=tuple(self._explained(failure, ranks) for one in parts for failure in one.failures),
            compute_seconds=layers_seconds + draft_seconds,
            copy_seconds=max(one.copy_seconds for one in parts),
            lanes=lanes,
            prompt_logprobs=tuple(scored for one in parts for scored in one.prompt_logprobs),
            drafts=tuple(drafted for one in parts for drafted in one.drafts),
            draft_seconds=draft_seconds,
            followed=tuple(followed for one in parts for followed in one.followed),
        )


def _strange_drafts(part: Done, step: Step, vocab_size: int) -> str | None:
    """Return what is wrong with a draft model's guesses, or with the tokens that it says it has computed; or None."""
    starts = {
        entry.id: entry.extents[0].start
        for entry in step.entries
        if entry.extents and entry.lane in part.lanes
    }
    for name, tokens in part.followed:
        if not 0 <= tokens <= starts.get(name, -1):
            return (
                f"the draft model has computed {tokens} tokens of {name}, which begins at {starts.get(name)}"
            )
    if not part.drafts:
        return None
    asked = {entry.id: entry.proposes for entry in step.entries if entry.lane in part.lanes}
    for name, draft in part.drafts:
        if len(draft) > asked.get(name, 0):
            return f"{len(draft)} guesses for {name}, of which {asked.get(name, 0)} are asked for"
        if any(not 0 <= token < vocab_size for token in draft):
            return f"{name} has a guess that is no token of {vocab_size}"
    return None


def _strange_samples(part: Done, step: Step, vocab_size: int) -> str | None:
    """Return how the samples of a report differ from what its step samples, or None."""
    drafts = {entry.id: entry.drafts for entry in step.entries if entry.samples and entry.lane in part.lanes}
    sampled: dict[str, list[int]] = {}
    for sample in part.samples:
        sampled.setdefault(sample.id, []).append(sample.token)
    for name, tokens in sampled.items():
        if name not in drafts or len(tokens) > 1 + len(drafts[name]):
            return f"does not sample {len(tokens)} tokens for {name} on lanes {part.lanes}"
        if tuple(tokens[:-1]) != drafts[name][: len(tokens) - 1]:
            return f"continues {name} after a token that was not drafted"
    outside = next((sample.token for sample in part.samples if not 0 <= sample.token < vocab_size), None)
    return None if outside is None else f"sampled token {outside} of {vocab_size}"


def _strange_logprobs(part: Done, running: Collection[str], vocab_size: int) -> str | None:
    """Return what is wrong with log-probabilities of prompts, or None."""
    for name, scored in part.prompt_logprobs:
        count, tops = len(scored.logprobs), len(scored.top_ids)
        if name not in running:
            return f"{name} is not part of it, and has log-probabilities"
        if sum(extent.count for extent in scored.extents) != count or len(scored.ranks) != count:
            return f"{name} has {count} log-probabilities and {len(scored.ranks)} ranks for {scored.extents}"
        if len(scored.top_logprobs) != tops or tops != count * scored.alternatives:
            return f"{name} has {tops} alternatives with {len(scored.top_logprobs)} log-probabilities"
        if any(not 0 <= token < vocab_size for token in scored.top_ids):
            return f"{name} has an alternative that is no token of {vocab_size}"
    return None
