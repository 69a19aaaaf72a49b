"""The KV of all lanes of a replica, as its controller decides it.

`KvPools` places requests on lanes, shares what is cached, evicts what nobody uses, and names each change in the numbers
that `Admit`, `Grow`, `Publish` and a release carry. `medha.kv.lane_replay` is what a rank makes of those.

What keeps a cached block correct:

* it is published only once its KV was computed (`Done`), whole, by a sequence whose entry did not fail;
* it stays locked while a sequence that shares or published it runs, and so is never evicted under a reader;
* at least the last token of a prompt is computed again, because it is what the first output is drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from medha.kv.blocks import BlockLedger, Run
from medha.kv.lane_replay import fork_on
from medha.kv.prefix_cache import Match, PrefixCache, hash_count, hash_range
from medha.shards import (
    MAX_SEGMENTS_TOLD,
    PROMPT_STRIPE_TOKENS,
    Deal,
    Segment,
    ShardMap,
    deal,
    deals_of,
    digest_of,
    is_dealt,
    place,
    spreads,
)
from medha.wire.messages import CachedPrefix, Eviction, Grow, Publish


@dataclass(slots=True)  # not frozen, for speed: every admission makes one
class Placed:
    """KV that a request has been given: what its `Admit` says of it."""

    shards: ShardMap
    cached_tokens: int = 0
    segments: tuple[Segment, ...] = ()
    deals: tuple[Deal, ...] = ()
    prefixes: tuple[CachedPrefix, ...] = ()
    evictions: tuple[Eviction, ...] = ()


@dataclass(slots=True)
class _Lane:
    ledger: BlockLedger
    cache: PrefixCache = field(default_factory=PrefixCache)

    @property
    def available_blocks(self) -> int:
        """Blocks that a request can get: free ones, and remembered ones that nobody locks."""
        return self.ledger.free_blocks + self.cache.evictable_blocks

    def make_free(self, blocks: int, lane: int) -> tuple[Eviction, ...]:
        """Evict what is missing to `blocks` free ones, if not a little more; `lane` is this one's number."""
        missing = blocks - self.ledger.free_blocks
        if missing <= 0:
            return ()
        evicted = self.cache.evict(missing)
        self.ledger.evict(evicted.runs)
        return (Eviction(evicted.used_before, evicted.last, evicted.count, lane),)

    def locked(self, sequence: str, lane: int) -> tuple[CachedPrefix, ...]:
        """What a sequence that has just come uses of the cache."""
        last, count = self.cache.end(sequence)
        return (CachedPrefix(last, count, lane),) if count else ()


@dataclass(slots=True)
class _Held:
    """What a sequence holds."""

    shards: ShardMap
    prompt_tokens: int
    chains: dict[int, str]  # lane -> hashes of the prompt's whole blocks there, in order
    unpublished: int  # whole prompt blocks that are not computed, or not published, yet
    outputs: list[str] = field(default_factory=list)  # hashes of the blocks behind those of the prompt


class KvPools:
    """Reservations, shard maps and prefix caches of `lanes` lanes with `kv_blocks` blocks each."""

    def __init__(
        self,
        *,
        lanes: int,
        kv_blocks: int,
        block_size_tokens: int,
        tokens_per_lane: int,
        prefix_caching: bool = True,
        deals_prompts: bool = False,
    ) -> None:
        """`deals_prompts`: long prompts lie in stripes on all lanes, and not on one after the other."""
        self.block_size_tokens = block_size_tokens
        self._lane_tokens = kv_blocks * block_size_tokens
        self._tokens_per_lane = tokens_per_lane
        self._prefix_caching = prefix_caching
        self._deals_prompts = deals_prompts
        # One length for all, or what is cached of one prompt would be of no use to another of another length.
        blocks = min(PROMPT_STRIPE_TOKENS, tokens_per_lane) // block_size_tokens
        self._stripe_tokens = max(blocks, 1) * block_size_tokens
        self._lanes = [_Lane(BlockLedger(kv_blocks, block_size_tokens)) for _ in range(lanes)]
        self._held: dict[str, _Held] = {}
        # Of all lanes together, in the order in which they happened: a lane's clock counts the releases there, and one
        # that is told out of turn makes its ranks evict other blocks than `medha.kv.prefix_cache` has.
        self._publishes: list[Publish] = []
        self._releases: dict[str, None] = {}
        self.queried_tokens = 0
        """Prompt tokens of admitted requests."""
        self.hit_tokens = 0
        """Those of them whose KV was cached."""

    # --- what is there --------------------------------------------------------------------------------

    def __contains__(self, sequence: str) -> bool:
        return sequence in self._held

    @property
    def lanes(self) -> int:
        return len(self._lanes)

    @property
    def blocks(self) -> int:
        """Of all lanes together."""
        return sum(lane.ledger.blocks for lane in self._lanes)

    @property
    def free_tokens(self) -> int:
        """Tokens that can be reserved on all lanes together; what is only cached counts as free."""
        return sum(self.free_tokens_on(lane) for lane in range(len(self._lanes)))

    @property
    def held_blocks(self) -> int:
        """Blocks that sequences hold, on all lanes together."""
        return sum(lane.ledger.held_blocks for lane in self._lanes)

    @property
    def cached_blocks(self) -> int:
        """Blocks that are kept for their content alone."""
        return sum(lane.ledger.remembered_blocks for lane in self._lanes)

    def ledger(self, lane: int = 0) -> BlockLedger:
        return self._lanes[lane].ledger

    def free_blocks_on(self, lane: int) -> int:
        here = self._lanes[lane]
        return here.ledger.free_blocks + here.cache.evictable_blocks

    def free_tokens_on(self, lane: int) -> int:
        return self._lanes[lane].available_blocks * self.block_size_tokens

    def shards(self, sequence: str) -> ShardMap:
        return self._held[sequence].shards

    def reserved_tokens(self, sequence: str) -> int:
        """Positions that the sequence's KV can hold: whole blocks."""
        return self._held[sequence].shards.tokens

    def _in_blocks(self, tokens: int) -> int:
        """What is given for a reservation of `tokens`. All that is told of it, here and to ranks, is this number."""
        return -(-tokens // self.block_size_tokens) * self.block_size_tokens

    def expected(self, prompt_tokens: int, block_hashes: str, *, is_long: bool = False) -> tuple[int, int]:
        """What a request that is admitted now would find: cached tokens, and those of its blocks that others hold.

        The latter cost it no room. Both are estimates for requests that wait: caches change, and so do lanes.
        """
        if not self._prefix_caching or not block_hashes:
            return 0, 0
        tokens = held_blocks = 0
        if is_long and self._deals_prompts:
            matches = self._dealt_matches(prompt_tokens, block_hashes)[0][1]
            tokens = sum(match.blocks for match in matches.values()) * self.block_size_tokens
            return tokens, sum(match.blocks - match.unlocked for match in matches.values())
        for found in self._shards_found(block_hashes, is_long=is_long):
            match = found[_best(found)]
            tokens += match.blocks * self.block_size_tokens
            held_blocks += match.blocks - match.unlocked
            if match.blocks < self._tokens_per_lane // self.block_size_tokens:
                break  # the next lane's part, if there is one, would begin behind a gap
        return min(
            tokens, (prompt_tokens - 1) // self.block_size_tokens * self.block_size_tokens
        ), held_blocks

    # --- operations -----------------------------------------------------------------------------------

    def admit(
        self,
        sequence: str,
        prompt_tokens: int,
        reserved_tokens: int,
        *,
        block_hashes: str = "",
        pending_seconds: Sequence[float] | None = None,
        remaining_seconds: Callable[[int], float] | None = None,
        owners: Sequence[int] | None = None,
    ) -> Placed | None:
        """Give a request the KV of `reserved_tokens` tokens on all of its lanes, or change nothing and return None.

        It gets whole blocks, and its map says so. A short request goes where its first token is expected soonest: the
        lane with the least prefill ahead (`pending_seconds`) plus its own, `remaining_seconds(cached tokens)`. One of
        `owners` has to own it.
        """
        assert sequence not in self._held, f"{sequence} already holds KV"
        if sequence in self._releases:
            return None  # ranks have still to release the earlier sequence of this name
        reserved_tokens = self._in_blocks(reserved_tokens)
        whole_blocks = prompt_tokens // self.block_size_tokens
        usable = self._prefix_caching and hash_count(block_hashes) == whole_blocks
        hashes = block_hashes if usable else ""
        if len(self._lanes) == 1:
            return self._admit_on_only_lane(sequence, prompt_tokens, reserved_tokens, hashes)
        maps = self._maps(prompt_tokens, reserved_tokens, hashes, pending_seconds, remaining_seconds, owners)
        for shards in maps:
            if owners is not None and shards.owner not in owners:
                continue
            chains = self._chains(shards, prompt_tokens, hashes)
            matches = self._matches(prompt_tokens, chains)
            if all(self._fits(shards, lane, matches.get(lane)) for lane in shards.lanes):
                return self._take(sequence, shards, prompt_tokens, chains, matches)
        return None

    def fork(self, parent: str, child: str, shared_tokens: int, reserved_tokens: int) -> Placed | None:
        """Let `child` share the first `shared_tokens` tokens of a parent of the same prompt; None if room is short."""
        assert child not in self._held, f"{child} already holds KV"
        reserved_tokens = self._in_blocks(reserved_tokens)
        held = self._held[parent]
        free = [self.free_tokens_on(lane) for lane in range(len(self._lanes))]
        shared = held.shards.local_lengths(shared_tokens)
        size = self.block_size_tokens
        for lane, tokens in shared.items():  # whole blocks cost nothing again
            free[lane] += tokens // size * size
        shards = held.shards.cut(shared_tokens, reserved_tokens, free, block_size_tokens=size)
        if shards is None:
            return None
        # From where on the child's part of the prompt lies elsewhere than its parent's, the parent's hashes are not its own.
        whole = self._whole_blocks(shards, _placed_alike(held.shards, shards, held.prompt_tokens))
        chains = {lane: hash_range(chain, 0, whole.get(lane, 0)) for lane, chain in held.chains.items()}
        prefixes: list[CachedPrefix] = []
        evictions: list[Eviction] = []
        for lane in shards.lanes:
            here, tokens = self._lanes[lane], shards.tokens_on(lane)
            blocks = here.ledger.blocks_for(tokens) - shared.get(lane, 0) // size
            evictions += here.make_free(blocks, lane)
            fork_on(here.ledger, parent, child, shared.get(lane, 0), tokens)
            chain = chains.get(lane, "")
            here.cache.lock(child, chain, min(shared.get(lane, 0) // size, hash_count(chain)))
            prefixes += here.locked(child, lane)
        unpublished = sum(map(hash_count, chains.values()))
        self._held[child] = _Held(shards, held.prompt_tokens, chains, unpublished)
        return Placed(shards, 0, *self._told(shards.segments), tuple(prefixes), tuple(evictions))

    def grow(self, sequence: str, tokens: int) -> Grow | None:
        """Let a reservation reach `tokens` tokens, in whole blocks, or change nothing and return None."""
        held = self._held[sequence]
        tokens = self._in_blocks(tokens)
        free = [self.free_tokens_on(lane) for lane in range(len(self._lanes))]
        shards = held.shards.grown(tokens, free, block_size_tokens=self.block_size_tokens)
        if shards is None:
            return None
        evictions: list[Eviction] = []
        for lane in shards.lanes:
            here, wanted = self._lanes[lane], shards.tokens_on(lane)
            if sequence not in here.ledger:
                evictions += here.make_free(here.ledger.blocks_for(wanted), lane)
                reserved = here.ledger.reserve(sequence, wanted)
                here.cache.lock(sequence, "", 0)
            else:
                more = here.ledger.blocks_for(wanted - here.ledger.reserved_tokens(sequence))
                evictions += here.make_free(more, lane)
                reserved = here.ledger.grow(sequence, wanted)
            assert reserved
        segments, deals = self._told(_changed(held.shards.segments, shards.segments))
        held.shards = shards
        return Grow(sequence, tokens, segments, tuple(evictions), deals)

    def computed(self, sequence: str, tokens: int) -> None:
        """The KV of the first `tokens` tokens is there and good: whole blocks of the prompt may be shared."""
        held = self._held[sequence]
        if not held.unpublished:
            return
        size, left = self.block_size_tokens, 0
        if self._deals_prompts and len(held.chains) > 1:
            computed = self._whole_blocks(held.shards, min(tokens, held.prompt_tokens))
            for lane, chain in held.chains.items():
                stop = min(computed.get(lane, 0), hash_count(chain))
                left += hash_count(chain) - stop
                if stop:
                    self._publish(sequence, lane, chain, stop)
            held.unpublished = left
            return
        if len(held.chains) == 1:
            ((lane, chain),) = held.chains.items()
            stop = min(min(tokens, held.prompt_tokens) // size, hash_count(chain))
            held.unpublished = hash_count(chain) - stop
            if stop:
                self._publish(sequence, lane, chain, stop)
            return
        for piece in held.shards.pieces(0, held.prompt_tokens):
            chain = held.chains.get(piece.lane, "")
            stop = min(max(0, min(piece.stop, tokens) - piece.start) // size, hash_count(chain))
            left += hash_count(chain) - stop
            if stop:
                self._publish(sequence, piece.lane, chain, stop)
        held.unpublished = left

    def extend(self, sequence: str, hashes: str, known_tokens: int) -> None:
        """An output token, the last of `known_tokens`, filled the block with this hash; it is published at the end.

        Output of a request on several lanes is dealt out in stripes, and not shared.
        """
        held = self._held[sequence]
        if len(held.chains) != 1 or len(held.shards.lanes) != 1:
            return
        blocks = held.prompt_tokens // self.block_size_tokens + len(held.outputs) + 1
        if blocks * self.block_size_tokens == known_tokens and hash_count(hashes) == 1:
            held.outputs.append(hashes)

    def forget_outputs(self, sequence: str) -> None:
        """KV of its output may be wrong: none of it is published."""
        self._held[sequence].outputs.clear()

    def release(self, sequence: str, computed_tokens: int = 0) -> None:
        """The sequence has ended and no step in flight has it: what only it held is free, or stays cached.

        Of its output, whole blocks among the first `computed_tokens` tokens are published.
        """
        held = self._held[sequence]
        if held.outputs and len(held.shards.lanes) == 1:
            chain = held.chains[held.shards.owner] + "".join(held.outputs)
            stop = min(computed_tokens // self.block_size_tokens, hash_count(chain))
            if stop > held.prompt_tokens // self.block_size_tokens:
                self._publish(sequence, held.shards.owner, chain, stop)
        for lane in self._held.pop(sequence).shards.lanes:
            here = self._lanes[lane]
            here.ledger.release(sequence)
            here.cache.unlock(sequence)
        self._releases[sequence] = None

    # --- what the ranks are told ----------------------------------------------------------------------

    # Every step tells every rank, whichever lanes it runs on: what concerns several lanes is one event for all of them.

    def take_publishes(self) -> tuple[Publish, ...]:
        """What ranks have to remember before they apply anything else, in order; of all lanes."""
        publishes, self._publishes = self._publishes, []
        return tuple(publishes)

    def take_releases(self) -> tuple[str, ...]:
        """Sequences that ranks have to release, in the order in which they ended here; of all lanes."""
        releases, self._releases = self._releases, {}
        return tuple(releases)

    @property
    def has_news(self) -> bool:
        """Whether ranks have something to publish or to release."""
        return bool(self._publishes or self._releases)

    def state_hashes(self) -> tuple[int, ...]:
        """For each lane a 53-bit digest of what its ranks replay: its ledger, and the shard maps of all sequences."""
        maps = digest_of({name: held.shards for name, held in self._held.items()})
        return tuple([lane.ledger.state_hash(maps) for lane in self._lanes])

    # --- placing --------------------------------------------------------------------------------------

    def _maps(
        self,
        prompt_tokens: int,
        reserved_tokens: int,
        hashes: str,
        pending_seconds: Sequence[float] | None,
        remaining_seconds: Callable[[int], float] | None,
        owners: Sequence[int] | None,
    ) -> Iterable[ShardMap]:
        """Maps to be tried in this order: the one that finds most in the caches, and one that counts on none."""
        lanes = range(len(self._lanes))
        if len(lanes) == 1:
            if reserved_tokens <= self._lane_tokens:
                yield ShardMap((Segment(0, 0, reserved_tokens),))
            return
        free = [self.free_tokens_on(lane) for lane in lanes]
        seconds = list(pending_seconds or [0.0] * len(free))
        is_long = spreads(
            prompt_tokens,
            reserved_tokens,
            lanes=len(lanes),
            tokens_per_lane=self._tokens_per_lane,
            lane_tokens=self._lane_tokens,
        )
        if is_long and self._deals_prompts:
            yield from self._dealt_maps(prompt_tokens, reserved_tokens, hashes, free)
            return
        for rooms, cached, preferred in self._views(prompt_tokens, hashes, free, is_long=is_long):
            if owners is not None and is_long and (not preferred or preferred[0] not in owners):
                preferred = [max(owners, key=lambda lane: (rooms[lane], -lane))]
            elif owners is not None and not is_long:
                rooms = [room if lane in owners else 0 for lane, room in enumerate(rooms)]
            expected = seconds
            if remaining_seconds is not None and any(cached):
                expected = [seconds[lane] + remaining_seconds(cached[lane]) for lane in lanes]
            shards = place(
                prompt_tokens,
                reserved_tokens,
                rooms,
                block_size_tokens=self.block_size_tokens,
                tokens_per_lane=self._tokens_per_lane,
                lane_tokens=self._lane_tokens,
                pending_seconds=expected,
                preferred=preferred,
            )
            if shards is not None:
                yield shards

    def _views(
        self, prompt_tokens: int, hashes: str, free: list[int], *, is_long: bool
    ) -> Iterable[tuple[list[int], list[int], list[int]]]:
        """Room and cached tokens of each lane, and lanes that come first: as the caches have it, and without them.

        What a lane has cached for this prompt and others hold costs no room there. A long prompt is led to the lanes
        that hold its shards, in their order.
        """
        size = self.block_size_tokens
        rooms, cached, preferred = list(free), [0] * len(free), list[int]()
        for found in self._shards_found(hashes, is_long=is_long):
            for lane, match in enumerate(found):
                if lane not in preferred:
                    rooms[lane] = free[lane] + (match.blocks - match.unlocked) * size
                    cached[lane] = min(match.blocks * size, prompt_tokens - 1)
            best = _best(found)
            if not is_long or found[best].blocks == 0 or best in preferred:
                break
            preferred.append(best)
        yield rooms, cached, preferred
        if any(cached):
            yield free, [0] * len(free), []

    def _shards_found(self, hashes: str, *, is_long: bool) -> Iterator[list[Match]]:
        """What each lane has cached of the prompt, shard by shard where it is cut."""
        blocks = hash_count(hashes)
        step = self._tokens_per_lane // self.block_size_tokens if is_long else blocks
        for shard in range(0, blocks, max(step, 1)):
            chain = hash_range(hashes, shard, shard + step) if is_long else hashes
            yield [lane.cache.match(chain, hash_count(chain)) for lane in self._lanes]

    def _chains(self, shards: ShardMap, prompt_tokens: int, hashes: str) -> dict[int, str]:
        """The hashes of each lane's part of the prompt; a lane holds one run of it."""
        if not hashes:
            return {}
        if len(shards.lanes) == 1:
            return {shards.owner: hashes}
        size = self.block_size_tokens
        if self._deals_prompts:
            lanes, stripe = len(self._lanes), self._stripe_tokens
            if not is_dealt(shards, prompt_tokens, lanes, stripe):
                return {}  # a lane's blocks could be those of a regular map again further on, after others
            parts: dict[int, list[str]] = {}
            for piece in shards.pieces(0, prompt_tokens):
                part = hash_range(hashes, piece.start // size, piece.stop // size)
                parts.setdefault(piece.lane, []).append(part)
            return {lane: "".join(found) for lane, found in parts.items()}
        return {
            piece.lane: hash_range(hashes, piece.start // size, piece.stop // size)
            for piece in shards.pieces(0, prompt_tokens)
        }

    def _matches(self, prompt_tokens: int, chains: dict[int, str]) -> dict[int, Match]:
        """What is cached of the prompt on each of its lanes, without a gap, and never its last token."""
        matches: dict[int, Match] = {}
        if self._deals_prompts and len(chains) > 1:
            return self._without_gap(prompt_tokens, chains)
        usable = (prompt_tokens - 1) // self.block_size_tokens
        for lane, chain in chains.items():
            stop = min(usable, hash_count(chain))
            matches[lane] = self._lanes[lane].cache.match(chain, stop)
            usable -= stop
            if matches[lane].blocks < hash_count(chain):
                break
        return matches

    # Where prompts are dealt out, the first lane's turn may be any lane's.

    def _dealt_maps(
        self, prompt_tokens: int, reserved_tokens: int, hashes: str, free: list[int]
    ) -> Iterator[ShardMap]:
        """The map that finds most in the caches, then those of other first lanes, which may have room."""
        size = self.block_size_tokens
        for lanes, matches in self._dealt_matches(prompt_tokens, hashes):
            rooms = list(free)
            for lane, match in matches.items():
                rooms[lane] += (match.blocks - match.unlocked) * size
            shards = deal(
                prompt_tokens,
                reserved_tokens,
                rooms,
                lanes,
                stripe_tokens=self._stripe_tokens,
                block_size_tokens=size,
            )
            if shards is not None:
                yield shards

    def _dealt_matches(
        self, prompt_tokens: int, hashes: str
    ) -> list[tuple[tuple[int, ...], dict[int, Match]]]:
        """Lanes in turn, and what is cached so, for each first lane: the longest prefix first, then the most room."""
        count = len(self._lanes)
        found = []
        for first in range(count):
            lanes = tuple((first + turn) % count for turn in range(count))
            chains: dict[int, str] = {}
            step = self._stripe_tokens // self.block_size_tokens
            if hashes:
                for turn, lane in enumerate(lanes):
                    starts = range(turn * step, hash_count(hashes), count * step)
                    chains[lane] = "".join(hash_range(hashes, start, start + step) for start in starts)
            matches = self._without_gap(prompt_tokens, chains)
            blocks = sum(match.blocks for match in matches.values())
            found.append((-blocks, -self.free_tokens_on(first), lanes, matches))
        found.sort(key=lambda one: one[:3])
        return [(lanes, matches) for _, _, lanes, matches in found]

    def _without_gap(self, prompt_tokens: int, chains: dict[int, str]) -> dict[int, Match]:
        """What is cached of a prompt whose parts, dealt out regularly in the order of `chains`, are these."""
        lanes, step = len(chains), self._stripe_tokens // self.block_size_tokens
        usable = (prompt_tokens - 1) // self.block_size_tokens
        for turn, (lane, chain) in enumerate(chains.items()):
            blocks = self._lanes[lane].cache.match(chain, hash_count(chain)).blocks
            if blocks < hash_count(chain):  # the first block that is missing here ends the prefix
                usable = min(usable, (blocks // step * lanes + turn) * step + blocks % step)
        matches = {}
        for turn, (lane, chain) in enumerate(chains.items()):
            whole, rest = divmod(usable, lanes * step)
            stop = whole * step + min(max(rest - turn * step, 0), step)
            matches[lane] = self._lanes[lane].cache.match(chain, stop)
        return matches

    def _whole_blocks(self, shards: ShardMap, tokens: int) -> dict[int, int]:
        """Whole blocks on each lane of the first `tokens` tokens."""
        blocks: dict[int, int] = {}
        for piece in shards.pieces(0, tokens):
            whole = (piece.stop - piece.start) // self.block_size_tokens
            blocks[piece.lane] = blocks.get(piece.lane, 0) + whole
        return blocks

    def _fits(self, shards: ShardMap, lane: int, match: Match | None) -> bool:
        here = self._lanes[lane]
        wanted = here.ledger.blocks_for(shards.tokens_on(lane))
        if match is None:
            return wanted <= here.available_blocks
        return wanted - match.blocks <= here.available_blocks - match.unlocked

    def _take(
        self,
        sequence: str,
        shards: ShardMap,
        prompt_tokens: int,
        chains: dict[int, str],
        matches: dict[int, Match],
    ) -> Placed:
        prefixes: list[CachedPrefix] = []
        evictions: list[Eviction] = []
        cached_blocks = 0
        for lane in shards.lanes:
            here, tokens, match = self._lanes[lane], shards.tokens_on(lane), matches.get(lane)
            blocks, runs = (match.blocks, match.runs) if match else (0, ())
            here.cache.lock(sequence, chains.get(lane, ""), blocks)  # before anything is evicted
            evictions += here.make_free(here.ledger.blocks_for(tokens) - blocks, lane)
            reserved = here.ledger.reserve(sequence, tokens, runs)
            assert reserved
            prefixes += here.locked(sequence, lane)
            cached_blocks += blocks
        cached_tokens = cached_blocks * self.block_size_tokens
        unpublished = sum(map(hash_count, chains.values()))
        self._held[sequence] = _Held(shards, prompt_tokens, chains, unpublished)
        self.queried_tokens += prompt_tokens if self._prefix_caching else 0
        self.hit_tokens += cached_tokens
        return Placed(shards, cached_tokens, *self._told(shards.segments), tuple(prefixes), tuple(evictions))

    def _admit_on_only_lane(self, sequence: str, prompt: int, reserved: int, hashes: str) -> Placed | None:
        """`admit` where there is nothing to choose, which makes it twice as fast."""
        here, size = self._lanes[0], self.block_size_tokens
        blocks, unlocked = 0, 0
        runs: tuple[Run, ...] = ()
        evictions: tuple[Eviction, ...] = ()
        if hashes:
            match = here.cache.match(hashes, min((prompt - 1) // size, hash_count(hashes)))
            blocks, runs, unlocked = match.blocks, match.runs, match.unlocked
        missing = here.ledger.blocks_for(reserved) - blocks
        free = here.ledger.free_blocks
        if missing > free + here.cache.evictable_blocks - unlocked:
            return None
        here.cache.lock(sequence, hashes, blocks)  # before anything is evicted
        if missing > free:
            evictions = here.make_free(missing, 0)
        taken = here.ledger.reserve(sequence, reserved, runs)
        assert taken
        shards = ShardMap((Segment(0, 0, reserved),))
        self._held[sequence] = _Held(shards, prompt, {0: hashes} if hashes else {}, hash_count(hashes))
        if self._prefix_caching:
            self.queried_tokens += prompt
        if not (runs or evictions):
            return Placed(shards)
        self.hit_tokens += blocks * size
        return Placed(shards, blocks * size, (), (), here.locked(sequence, 0), evictions)

    def _publish(self, sequence: str, lane: int, chain: str, stop: int) -> None:
        here = self._lanes[lane]
        published = here.cache.publish(sequence, chain, stop, here.ledger.runs(sequence, 0, stop))
        if published is not None:
            new, after = published
            if new:
                here.ledger.remember(sequence, stop - new, new)
            self._publishes.append(Publish(sequence, stop - new, new, lane, after))

    def _told(self, segments: tuple[Segment, ...]) -> tuple[tuple[Segment, ...], tuple[Deal, ...]]:
        """What a message says of a map: few segments as they are, many as deals, nothing where there is only one lane."""
        if len(self._lanes) == 1:
            return (), ()
        return (segments, ()) if len(segments) <= MAX_SEGMENTS_TOLD else ((), deals_of(segments))


def _best(found: Sequence[Match]) -> int:
    """The lane that has most; of several the first."""
    return max(range(len(found)), key=lambda lane: (found[lane].blocks, -lane))


def _placed_alike(one: ShardMap, other: ShardMap, tokens: int) -> int:
    """How many of the first `tokens` positions lie at the same places in both maps."""
    for here, there in zip(one.pieces(0, tokens), other.pieces(0, tokens), strict=False):
        if here.lane != there.lane:
            return here.start
        if here.stop != there.stop:
            return min(here.stop, there.stop)
    return tokens


def _changed(before: Sequence[Segment], after: Sequence[Segment]) -> tuple[Segment, ...]:
    """The segments of `after` from the first one on that `before` has not."""
    same = 0
    while same < len(before) and before[same] == after[same]:
        same += 1
    return tuple(after[same:])
