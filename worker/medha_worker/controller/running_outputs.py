"""The outputs of running requests, from which come block hashes, guesses, and the longer prompts of those that step aside."""

from __future__ import annotations

from dataclasses import replace

from medha.scheduler.controller import ReplicaController
from medha.scheduler.prompt_lookup import PromptLookup
from medha.scheduler.request import Request
from medha.wire.messages import Done, Emit, SteppedAside
from medha_worker.controller.output_hashes import OutputHasher
from medha_worker.controller.output_ids import OutputIds
from medha_worker.controller.prompts import PromptStore


class RunningOutputs:
    """The outputs of one epoch."""

    def __init__(self, prompts: PromptStore, most_looked_up: int | None) -> None:
        """`most_looked_up` is the length of the longest draft of prompt lookup; None: there is no prompt lookup."""
        self._prompts = prompts
        self._hashes = OutputHasher()
        self._ids = OutputIds()
        # One more, because a step in flight may be sampling the first token of a draft.
        self._lookup = None if most_looked_up is None else PromptLookup(1 + most_looked_up)

    def completed(self, done: Done, core: ReplicaController) -> Done:
        """Return `done` with hashes of the blocks that its samples fill, and with guesses at the tokens after them."""
        return self._with_drafts(self._with_hashes(done, core), core)

    def emitted(self, emit: Emit) -> None:
        """Keep the tokens of an answer, or forget the request with its last one."""
        if emit.finish_reason:
            self.end(emit.id)
        else:
            self._ids.add(emit.id, emit.tokens)

    def step_aside(self, aside: SteppedAside) -> None:
        """Append a request's output to its prompt, because it will compute both again."""
        output = self._ids.take(aside.id)
        if aside.prompt != aside.source:
            self._prompts.extend(aside.source, aside.prompt, output)
        self._hashes.end(aside.id)  # it goes on with the hash of the new prompt
        if self._lookup is not None:
            self._lookup.end(aside.id, is_finished=False)

    def end(self, request_id: str) -> None:
        """Forget the output of a request that has ended."""
        self._hashes.end(request_id)
        self._ids.end(request_id)
        if self._lookup is not None:
            self._lookup.end(request_id)

    def _with_hashes(self, done: Done, core: ReplicaController) -> Done:
        hashes = []
        for sample in done.samples:
            if sample.id not in self._hashes:
                request = _without_output(core, sample.id)
                prompt = None if request is None else self._prompts.hash_of(request.submit.prompt)
                if prompt is None:
                    continue
                self._hashes.begin(sample.id, prompt)
            filled = self._hashes.add(sample.id, sample.token)
            if filled:
                hashes.append((sample.id, filled))
        return replace(done, block_hashes=tuple(hashes)) if hashes or done.block_hashes else done

    def _with_drafts(self, done: Done, core: ReplicaController) -> Done:
        lookup = self._lookup
        if lookup is None:
            return done
        for sample in done.samples:
            if sample.id not in lookup:
                request = _without_output(core, sample.id)
                ids = None if request is None else self._prompts.ids_of(request.submit.prompt)
                if request is None or ids is None:
                    continue
                salt = self._prompts.salt_of(request.submit.prompt)
                lookup.begin(sample.id, request.submit.prompt, ids, salt)
            lookup.add(sample.id, sample.token)
        lookup.index_piece()
        following = {sample.id: sample.finish_reason is None for sample in done.samples}
        drafts = [
            (name, lookup.draft(name)) for name, goes_on in following.items() if goes_on and name in lookup
        ]
        return replace(done, drafts=tuple(one for one in drafts if one[1]))


def _without_output(core: ReplicaController, request_id: str) -> Request | None:
    """Return a running request that has emitted nothing; None otherwise: what was emitted before is not known here."""
    request = core.find(request_id)
    return None if request is None or request.ended or request.emitted else request
