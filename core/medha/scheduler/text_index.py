"""An index of a text of token ids: behind which position each run of its tokens occurred last.

Runs of several lengths are indexed (`RUN_TOKENS`), each length in a hash table of its own. A run is looked up from the
longest length to the shortest, so that the longest repetition is found within a factor of two of its length, in a bounded
time, and wherever it is. Where two runs have one place in a table, the later one stays, and the earlier one is not found.

A text is indexed in segments of 2^20 tokens, each with tables of its own, so that no table is so large that making it delays a
step. The number of places of a table is the least power of two that is not below the size of its segment; each place
has four bytes. So the index of a text takes 16 to 32 bytes a token. Hashes are polynomials over the tokens, modulo
2^64. The hash of the next run follows from that of the last one. numpy computes those of many runs at once, doubling
their length each time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from medha.wire.frames import TokenIds

RUN_TOKENS = (3, 6, 12, 24)
"""Lengths of the runs; each is twice the one before. Runs that are shorter than the first occur again by chance."""
_LONGEST = RUN_TOKENS[-1]
SEGMENT_TOKENS = 1 << 20
"""Tokens that have tables of their own."""
_LEAST_BITS = 6
_BITS = 64
_MASK = (1 << _BITS) - 1
_TOKEN_FACTOR = 0x9E3779B97F4A7C15  # odd numbers, which lose nothing modulo 2^64
_BASE = 0xC2B2AE3D27D4EB4F
_PLACE_FACTOR = 0x165667B19E3779F9
_TOKEN_FOLD, _PLACE_FOLD = 29, 32
_POWERS = tuple(pow(_BASE, tokens, 1 << _BITS) for tokens in RUN_TOKENS)


class TextIndex:
    """A text that may grow, and an index of its runs."""

    def __init__(self, ids: TokenIds, length: int) -> None:
        """`ids`, int32 [n], begins with the `length` tokens of the text; the rest is room for more."""
        self.ids, self.length = ids, length
        self.indexed = 0
        """Position behind the last token whose runs are indexed."""
        self._make_tables()

    def _make_tables(self) -> None:
        bits = max(_LEAST_BITS, (min(len(self.ids), SEGMENT_TOKENS) - 1).bit_length())
        self._shift = _BITS - bits
        # Positions behind runs, int32 [lengths, places], of each segment; 0: no run has this place.
        self._tables: list[npt.NDArray[np.int32]] = []
        # The rows of the same tables: to read one number from an array, numpy takes three times as long.
        self._rows: list[list[memoryview[int]]] = []

    def _segment_of(self, behind: int) -> int:
        """Return the number of the segment of runs that end before position `behind`; make its tables if need be."""
        segment = (behind - 1) // SEGMENT_TOKENS
        while len(self._tables) <= segment:
            table = np.zeros((len(RUN_TOKENS), 1 << (_BITS - self._shift)), dtype=np.int32)
            self._tables.append(table)
            self._rows.append([row.data for row in table])
        return segment

    @property
    def table_bytes(self) -> int:
        """Return the memory of the tables so far."""
        return sum(table.nbytes for table in self._tables)

    def index_until(self, stop: int, start: int = 0) -> None:
        """Index all runs that end at or before position `stop`, and begin at `start` or later."""
        while self.indexed < stop:
            segment_end = (self.indexed // SEGMENT_TOKENS + 1) * SEGMENT_TOKENS
            self._index_piece(min(stop, segment_end), start)

    def _index_piece(self, stop: int, start: int) -> None:
        """Index the runs up to `stop`, which all end in one segment."""
        first, table = max(start, self.indexed + 1 - _LONGEST), self._tables[self._segment_of(stop)]
        ids = self.ids[first:stop].astype(np.uint64)
        self.indexed, indexed = stop, self.indexed
        tokens = (ids + np.uint64(1)) * np.uint64(_TOKEN_FACTOR)
        tokens ^= tokens >> np.uint64(_TOKEN_FOLD)
        base = np.uint64(_BASE)
        hashes = (tokens[:-2] * base + tokens[1:-1]) * base + tokens[2:]
        for row, length in enumerate(RUN_TOKENS):
            if row:
                half = RUN_TOKENS[row - 1]
                hashes = hashes[:-half] * np.uint64(_POWERS[row - 1]) + hashes[half:]
            if len(hashes) == 0:
                return
            behind = np.arange(first + length, first + length + len(hashes), dtype=np.int32)
            new = slice(max(indexed + 1 - (first + length), 0), None)
            # Where several runs have one place, the last one stays.
            table[row, self._places(hashes[new])] = behind[new]

    def _places(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        folded = hashes ^ (hashes >> np.uint64(_PLACE_FOLD))
        return (folded * np.uint64(_PLACE_FACTOR)) >> np.uint64(self._shift)

    def _place(self, run_hash: int) -> int:
        return ((run_hash ^ (run_hash >> _PLACE_FOLD)) * _PLACE_FACTOR & _MASK) >> self._shift

    def append(self, token: int) -> None:
        """Add a token to the text; its runs are indexed by `put`."""
        if self.length == len(self.ids):
            self.ids = np.concatenate([self.ids, np.empty_like(self.ids)])
            self._make_tables()
            self.indexed = 0
            self.index_until(self.length)
        self.ids[self.length] = token
        self.length += 1

    def put(self, row: int, run_hash: int) -> None:
        """Index the run of length `RUN_TOKENS[row]` that ends the text."""
        self._rows[self._segment_of(self.length)][row][self._place(run_hash)] = self.length
        self.indexed = self.length

    def find(self, row: int, run_hash: int, run: bytes) -> int:
        """Return the position behind the last occurrence of a run that is found, else 0; `run` has the bytes of its ids."""
        place = self._place(run_hash)
        for rows in reversed(self._rows):
            behind = rows[row][place]
            if behind and self.ids[max(behind - RUN_TOKENS[row], 0) : behind].tobytes() == run:
                return behind
        return 0


class RunHashes:
    """The hashes of the last runs of a text, one of each length, as its tokens come."""

    def __init__(self) -> None:
        self.hashes = [0] * len(RUN_TOKENS)
        self._last = [0] * _LONGEST  # the tokens of the longest run, in a ring
        self._next = 0

    def append(self, token: int) -> None:
        """Take the next token."""
        new = (token + 1) * _TOKEN_FACTOR & _MASK
        new ^= new >> _TOKEN_FOLD
        last, place, hashes = self._last, self._next, self.hashes
        for row, length in enumerate(RUN_TOKENS):
            hashes[row] = (hashes[row] * _BASE + new - last[place - length] * _POWERS[row]) & _MASK
        last[place] = new
        self._next = (place + 1) % _LONGEST
