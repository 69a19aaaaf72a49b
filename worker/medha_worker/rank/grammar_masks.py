"""Masks of the tokens that a sequence's grammar allows next; the rank that samples a sequence follows its grammar.

The tokens that a grammar allows are a pure function of the output ids so far. So a resumed sequence replays the output
that it already has, and a step that fails, or is planned twice, changes nothing. Grammars are compiled when the
controller asks for it, on a thread of their own. A step samples under a grammar only after it was reported as compiled,
so no step waits for one. Masks are computed on another thread while steps run: the mask of a token begins when the token
before it is sampled. llguidance lets other threads run meanwhile.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from medha.errors import CheckpointInvalid
from medha.wire.grammar_limits import COMPILE_STACK_BYTES, PARSER_LIMITS
from medha.wire.messages import Admit
from medha.wire.token_bytes import spelled_bytes
from medha_worker.checkpoints.tokenizer_files import whole_tokenizer
from medha_worker.model.sampling_plan import WORD_BITS

FORMER_GRAMMARS = 64
"""Compiled grammars that are kept after their epoch or their last request, because they may soon be needed again."""

Report = Callable[[str], None]
"""Function that is called once a grammar is compiled, on whatever thread, with "" or the reason why it cannot be."""


class Vocabulary:
    """The tokens of a model in the form that llguidance reads; called with a text, it tokenises that."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Read a `tokenizer.json`; ids below `vocab_size` that it does not name are never sampled.

        Raises:
            CheckpointInvalid: its decoder is unknown.
        """
        self._tokenizer = Tokenizer.from_buffer(tokenizer_json)
        added = self._tokenizer.get_added_tokens_decoder()
        names = self._tokenizer.get_vocab(with_added_tokens=True)
        spelled = spelled_bytes(
            {number: self._tokenizer.id_to_token(number) or token for token, number in names.items()},
            json.loads(tokenizer_json)["decoder"],
        )
        special = {number for number, token in added.items() if token.special} | set(eos_token_ids)
        self.tokens = [spelled.get(number, b"") for number in range(vocab_size)]
        self.special_token_ids = sorted(number for number in special if number < vocab_size)
        self.eos_token_ids = [number for number in eos_token_ids if number < vocab_size]
        self.eos_token_id = self.eos_token_ids[0] if self.eos_token_ids else 0
        self.bos_token_id = None
        self._ids = {
            token: number for number, token in enumerate(self.tokens) if token and number not in special
        }
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes | str) -> list[int]:
        """Return ids that spell a text, none of them special: if possible, those of the tokenizer."""
        wanted = text.encode() if isinstance(text, str) else text
        ids: list[int] = []
        try:
            ids = self._tokenizer.encode(wanted.decode(), add_special_tokens=False).ids
        except UnicodeDecodeError:  # it begins or ends inside a character
            return self._longest_first(wanted)
        known = [self.tokens[number] for number in ids if number < len(self.tokens)]
        is_spelled = len(known) == len(ids) and b"".join(known) == wanted
        plain = is_spelled and all(token in self._ids for token in known)
        return ids if plain else self._longest_first(wanted)

    def _longest_first(self, text: bytes) -> list[int]:
        """Return ids that spell a text, or the beginning of it up to a byte that no token has."""
        ids, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[text[start:end]])
            start = end
        return ids


class GrammarMask:
    """The mask of one sequence (`TokenMask`). Only one thread at a time may call it."""

    def __init__(self, follower: Follower, compiled: Future[LLMatcher]) -> None:
        """`compiled` is its grammar's matcher."""
        self._follower, self._compiled = follower, compiled
        self._matcher: LLMatcher | None = None
        self._known = 0  # output ids that the matcher has consumed, or is to consume
        self._words: tuple[int, torch.Tensor] | None = None  # of this many output ids
        self._has_asked = False  # for words that it has not waited for yet
        self.pending: Future[None] | None = None  # the words that it asked for, once the follower has begun
        self._fault: str | None = None

    @property
    def fault(self) -> str | None:
        return self._fault

    def ahead(self, outputs: Sequence[int]) -> None:
        if self._compiled.done():  # otherwise it begins with the first step that samples
            self._ask(outputs)

    def words(self, outputs: Sequence[int]) -> torch.Tensor:
        self._wait()
        if self._words is None or self._words[0] != len(outputs):
            self._ask(outputs)
            self._wait()
        assert self._words is not None
        return self._words[1]

    def _ask(self, outputs: Sequence[int]) -> None:
        self._wait()
        tokens = list(outputs[self._known :])
        self._known += len(tokens)
        self._has_asked = True
        self._follower.ask(self, tokens)

    def _wait(self) -> None:
        """Wait for the words that were asked for; llguidance's limits bound the time of a mask."""
        if not self._has_asked:
            return
        if self.pending is None:
            self._follower.begin()
        assert self.pending is not None
        self._has_asked, pending, self.pending = False, self.pending, None
        pending.result()

    # On the follower's thread --------------------------------------------------------------------------

    def matcher(self) -> LLMatcher | None:
        """Return its matcher; None if there is none."""
        if not self._compiled.done():
            self._fault = "a step came before the grammar was compiled: the controller and this rank disagree"
            return None
        error = self._compiled.exception()
        if error is not None:
            self._fault = _unable(error)
            return None
        self._matcher = self._matcher or self._compiled.result().deep_copy()
        return self._matcher

    def forget(self) -> None:
        """Forget the matcher, which may have consumed some tokens; the next question begins with all output ids."""
        self._matcher, self._known = None, 0

    def take(self, words: torch.Tensor) -> None:
        """Take the words after all known ids; they allow no token if the grammar cannot be followed."""
        matcher = self._matcher
        if matcher is not None and matcher.is_error():
            words.zero_()
            self._fault = (
                f"the grammar of this request cannot be followed further: {_brief(matcher.get_error())}"
            )
        self._words = self._known, words


class Follower:
    """Computes the masks of a step's sequences together, on a thread of its own.

    Threads of Python take turns, so one task with few calls disturbs the running step less than many tasks would.
    """

    def __init__(self, vocab_size: int) -> None:
        self._columns = -(-vocab_size // WORD_BITS)
        self._thread = ThreadPoolExecutor(1, "grammar-follows")
        self._computes = LLExecutor(num_threads=1)
        self._lock = threading.Lock()  # the next step is planned on another thread than the running one
        self._asked: list[tuple[GrammarMask, list[int]]] = []

    def ask(self, mask: GrammarMask, tokens: list[int]) -> None:
        """Ask for the mask after further output ids of a sequence; `begin` starts to compute it."""
        with self._lock:
            self._asked.append((mask, tokens))

    def begin(self) -> None:
        """Start to compute all masks that were asked for."""
        with self._lock:
            asked, self._asked = self._asked, []
            if not asked:
                return
            begun = self._thread.submit(self._follow, asked)
            for mask, _ in asked:
                mask.pending = begun

    def _follow(self, asked: Sequence[tuple[GrammarMask, list[int]]]) -> None:
        try:
            self._compute(asked)
        except BaseException:
            for mask, _ in asked:
                mask.forget()
            raise

    def _compute(self, asked: Sequence[tuple[GrammarMask, list[int]]]) -> None:
        words = torch.zeros(len(asked), self._columns, dtype=torch.int32)  # no token is allowed
        found = [(mask.matcher(), tokens) for mask, tokens in asked]
        decodes = [(one, tokens[0]) for one, tokens in found if one is not None and len(tokens) == 1]
        if decodes:
            self._computes.consume_token_par(decodes)
        for one, tokens in found:
            if one is not None and len(tokens) > 1:
                one.consume_tokens(tokens)
        followed = [
            (one, row) for row, (one, _) in enumerate(found) if one is not None and not one.is_error()
        ]
        if followed:
            self._computes.unsafe_compute_mask_ptr(
                followed, words.data_ptr(), words.itemsize * self._columns, len(asked)
            )
        for row, (mask, _) in enumerate(asked):
            mask.take(words[row])


class GrammarMasks:
    """Compiles grammars, and makes the masks of the sequences that a rank samples; outlives epochs."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], vocab_size: int) -> None:
        """`vocabulary` is called on a thread, once."""
        self._follower = Follower(vocab_size)
        self._compiles = ThreadPoolExecutor(1, "grammar-compiles")
        before = threading.stack_size(COMPILE_STACK_BYTES)
        try:  # this starts the thread
            self._tokenizer = self._compiles.submit(lambda: _tokenizer(vocabulary()))
        finally:
            threading.stack_size(before)
        self._compiled: dict[str, Future[LLMatcher]] = {}  # by name: those that the controller has asked for
        self._former: dict[str, Future[LLMatcher]] = {}  # of earlier epochs, or dropped; the last ones last

    def close(self) -> None:
        """Cancel compilations that have not begun; the end of the process waits for the one that runs."""
        self._compiles.shutdown(wait=False, cancel_futures=True)

    def begin_epoch(self) -> None:
        """Keep what is compiled, and begin nothing else that an earlier epoch has asked for."""
        self._keep({name: one for name, one in self._compiled.items() if not one.cancel()})
        self._compiled = {}

    def compile(self, name: str, grammar: str, report: Report) -> None:
        """Begin to compile a grammar, unless that is done already."""
        compiled = self._former.pop(name, None) or self._compiles.submit(self._matcher, grammar)
        self._compiled[name] = compiled
        compiled.add_done_callback(lambda done: None if done.cancelled() else report(_outcome(done)))

    def drop(self, name: str) -> None:
        """Forget a grammar that no further sequence needs; if its compilation has not begun, it never does.

        A compilation that has begun is kept for a while. If its grammar is asked for again, it is not compiled a
        second time, and the report of that compilation serves both.
        """
        compiled = self._compiled.pop(name, None)
        if compiled is not None and not compiled.cancel():
            self._keep({name: compiled})

    def _keep(self, compiled: dict[str, Future[LLMatcher]]) -> None:
        self._former |= compiled
        for name in list(self._former)[:-FORMER_GRAMMARS]:
            del self._former[name]

    def mask_for(self, admit: Admit) -> GrammarMask | None:
        """Return the mask of an admitted sequence; None without grammar.

        Raises:
            ValueError: the controller has not asked for its grammar.
        """
        name = admit.sampling.grammar
        if not name:
            return None
        if name not in self._compiled:
            raise ValueError(
                "its grammar is not here, so it was dropped before: nobody waits for this sequence"
            )
        return GrammarMask(self._follower, self._compiled[name])

    def begin(self) -> None:
        """Start to compute all masks that sequences have asked for ahead of their next step."""
        self._follower.begin()

    def _matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher at the beginning of a grammar.

        Raises:
            CheckpointInvalid: the model's tokens cannot follow any grammar.
            ValueError: llguidance cannot read it.
        """
        limits = LLParserLimits(**PARSER_LIMITS._asdict())
        matcher = LLMatcher(self._tokenizer.result(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(_brief(matcher.get_error()))
        return matcher


def masks_of(directory: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarMasks:
    """Return the maker of masks for a checkpoint's vocabulary."""

    def vocabulary() -> Vocabulary:
        return Vocabulary(whole_tokenizer(directory)["tokenizer.json"], vocab_size, eos_token_ids)

    return GrammarMasks(vocabulary, vocab_size)


def _outcome(compiled: Future[LLMatcher]) -> str:
    error = compiled.exception()
    return "" if error is None else _unable(error)


def _unable(error: BaseException) -> str:
    return f"this model cannot follow the grammar of this request: {error}"


def _brief(error: str) -> str:
    """Return the first line of an error of llguidance, without the text that it is about."""
    return error.partition("\n")[0][:200]


def _tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """Return the vocabulary as llguidance keeps it.

    Raises:
        CheckpointInvalid: no token ends a text.
    """
    if not vocabulary.eos_token_ids:
        raise CheckpointInvalid(
            "generation_config.json and config.json name no eos_token_id, so no text could end where its grammar does"
        )
    return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=vocabulary.eos_token_ids)
