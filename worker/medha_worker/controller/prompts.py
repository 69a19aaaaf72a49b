"""Token ids of prompts, on their way from a router to the ranks.

Ids and requests come on two links, with no order between them, so a request may have to wait here for its
ids. A prompt is kept while requests for it are still to come (`Tokens.sequences` is their number) or are
known to the controller. The ranks get it ahead of the step that admits its first sequence.

Each prompt belongs to the router that it came from: no other can add to it, or name it in a request.

The hashes of a prompt's blocks are computed here, piece by piece as the ids arrive. A request is passed on with
these hashes, so that nothing later needs the ids to find out which prompts share a prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from medha.errors import WireInvalid
from medha.kv.prefix_cache import PrefixHasher, PromptHash
from medha.wire.frames import TokenIds
from medha.wire.messages import Submit, Tokens


@dataclass(slots=True)
class _Prompt:
    sender: bytes  # identity of the link that it comes from
    ids: TokenIds
    hash: PromptHash | None = None  # of the ids received so far; None: there are none, or hashing is off
    salt: str = ""  # prompts share KV only with those of the same salt
    received: int = 0
    awaited: int = 0  # requests still to come
    on_ranks: bool = False
    held: dict[str, Submit] = field(default_factory=dict)  # requests that wait for the rest of the ids

    @property
    def complete(self) -> bool:
        return self.received == len(self.ids)


class PromptStore:
    """Prompts by name, and the requests that wait for their token ids."""

    def __init__(self, longest_tokens: int, vocab_size: int, hasher: PrefixHasher | None = None) -> None:
        """Without a `hasher`, requests are passed on without hashes and share no prefixes."""
        self._longest_tokens = longest_tokens
        self._vocab_size = vocab_size
        self._hasher = hasher
        self._prompts: dict[str, _Prompt] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def held_ids(self) -> list[str]:
        """Ids of the requests that wait here for their token ids."""
        return [request_id for prompt in self._prompts.values() for request_id in prompt.held]

    def receive(self, tokens: Tokens, ids: TokenIds, sender: bytes = b"") -> list[Submit]:
        """Add a piece of a prompt; if it is the last one, return the requests that waited for it.

        Each of them is still awaited, until it is passed on (`pass_on`).

        Raises:
            WireInvalid: the piece does not continue the ids received so far, or has an id that no token has; or the
                prompt is another sender's.
        """
        name, total = tokens.prompt, tokens.total
        prompt = self._prompts.get(name)
        if not 0 < total <= self._longest_tokens or tokens.sequences < 1:
            raise WireInvalid(f"prompt {name:.80} of {total} tokens for {tokens.sequences} requests")
        if prompt is not None and prompt.sender != sender:
            raise WireInvalid(f"prompt {name:.80} belongs to another router")
        if prompt is not None and total != len(prompt.ids):
            raise WireInvalid(f"prompt {name:.80} has {len(prompt.ids)} tokens, not {total}")
        # Checked before anything is kept: a prompt whose first pieces went elsewhere would never be complete.
        received = 0 if prompt is None else prompt.received
        if tokens.offset != received or not 0 < len(ids) <= total - received:
            raise WireInvalid(
                f"prompt {name:.80}: {len(ids)} ids at {tokens.offset}, expected some at {received} of {total}"
            )
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size:
            raise WireInvalid(f"prompt {name:.80}: an id is not within 0 .. {self._vocab_size - 1}")
        if prompt is None:
            prompt = self._expect(name, total, sender)
        if tokens.offset == 0:
            prompt.awaited += tokens.sequences
            prompt.salt = tokens.cache_salt
            prompt.hash = None if self._hasher is None else self._hasher.start(tokens.cache_salt)
        prompt.ids[received : received + len(ids)] = ids
        prompt.received = received + len(ids)
        if prompt.hash is not None:
            prompt.hash.update(ids)
        if not prompt.complete:
            return []
        released = list(prompt.held.values())
        prompt.held.clear()
        prompt.awaited = max(prompt.awaited, len(released))  # even if fewer were announced
        if prompt.awaited <= 0 and not released:
            del self._prompts[name]  # all its requests were cancelled meanwhile
        return [self.hashed(submit) for submit in released]

    def pass_on(self, submit: Submit) -> None:
        """Count a request that was held as passed on to the controller, which may still refuse it."""
        self._prompts[submit.prompt].awaited -= 1

    def hashed(self, submit: Submit) -> Submit:
        """Return the request with the hashes of its prompt, in place of any that it came with."""
        prompt = self._prompts.get(submit.prompt)
        hashes = "" if prompt is None or prompt.hash is None else prompt.hash.hashes
        return submit if submit.block_hashes == hashes else replace(submit, block_hashes=hashes)

    def hash_of(self, name: str) -> PromptHash | None:
        """Return the hash of a prompt, or None if it is not complete or prompts are not hashed."""
        prompt = self._prompts.get(name)
        return prompt.hash if prompt is not None and prompt.complete else None

    def ids_of(self, name: str) -> TokenIds | None:
        """Return the ids of a prompt, int32 [n], or None if it is not complete."""
        prompt = self._prompts.get(name)
        return prompt.ids if prompt is not None and prompt.complete else None

    def salt_of(self, name: str) -> str | None:
        """Return the cache salt of a known prompt; None if prompts share no KV here."""
        return None if self._hasher is None else self._prompts[name].salt

    def contradicts(self, submit: Submit, sender: bytes = b"") -> str | None:
        """Return how a request contradicts what is known of its prompt, or None."""
        prompt = self._prompts.get(submit.prompt)
        if prompt is None:
            return None
        if prompt.sender != sender:
            return f"prompt {submit.prompt:.80} belongs to another router"
        if submit.tokens != len(prompt.ids):
            return f"prompt {submit.prompt:.80} has {len(prompt.ids)} tokens, not {submit.tokens}"
        return f"request {submit.id:.80} is already here" if submit.id in prompt.held else None

    def hold(self, submit: Submit, sender: bytes = b"") -> bool:
        """Keep a request whose ids are not complete yet; return False if it need not wait."""
        if not 0 < submit.tokens <= self._longest_tokens:
            return False  # the controller will refuse it
        prompt = self._prompts.get(submit.prompt) or self._expect(submit.prompt, submit.tokens, sender)
        if prompt.complete:
            prompt.awaited -= 1
            return False
        prompt.held[submit.id] = submit
        return True

    def withdraw(self, request_id: str) -> None:
        """Remove a request that is held here; its ids are dropped with the prompt's last request."""
        for prompt in self._prompts.values():
            if prompt.held.pop(request_id, None) is not None:
                prompt.awaited -= 1  # below zero before the first piece, which adds the number of requests
                return

    def abandon(self, sender: bytes = b"") -> None:
        """Drop a sender's held requests, and its prompts that are not on the ranks.

        Its prompts on the ranks await no further requests, and stay until the controller forgets them (`forgotten`).
        """
        for name, prompt in list(self._prompts.items()):
            if prompt.sender != sender:
                continue
            prompt.held.clear()
            prompt.awaited = 0
            if not prompt.on_ranks:
                del self._prompts[name]

    def extend(self, source: str, name: str, output: TokenIds) -> None:
        """Add the complete prompt `name`: the ids of the complete prompt `source`, and `output` (int32 [n])."""
        before = self._prompts[source]
        ids = np.concatenate([before.ids, output])
        prompt = self._prompts[name] = _Prompt(before.sender, ids, received=len(ids), salt=before.salt)
        if before.hash is not None:
            prompt.hash = before.hash.fork()
            prompt.hash.update(output)

    def take_unsent(self, name: str) -> TokenIds | None:
        """Return the ids (int32 [n]) of a prompt and mark them as sent; None if the ranks have them."""
        prompt = self._prompts[name]
        if prompt.on_ranks:
            return None
        prompt.on_ranks = True
        return prompt.ids

    def forgotten(self, name: str) -> None:
        """Record that the controller and the ranks no longer need a prompt; drop it if no request is awaited."""
        prompt = self._prompts.get(name)
        if prompt is None:
            return
        prompt.on_ranks = False
        if prompt.complete and prompt.awaited <= 0:
            del self._prompts[name]

    def _expect(self, name: str, tokens: int, sender: bytes) -> _Prompt:
        prompt = self._prompts[name] = _Prompt(sender, np.zeros(tokens, dtype=np.int32))
        return prompt
