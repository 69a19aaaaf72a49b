"""Checks and conversions of grammars in processes of their own: no grammar may crash the router, or occupy it.

llguidance recurses as deep as a grammar is nested, until the stack ends, and may compute for minutes before its own
limits hold. Its conversion of GBNF takes half a minute for 100,000 blank lines. So every check is made in a fork of a
small process. The kernel ends that fork when it takes too much.

The two ends of a pipe exchange texts. A question begins with `_CHECK` or `_CONVERT`, and a grammar follows. An answer
is `_CONVERT` and the converted grammar, or `_CHECK` and the fault, which is empty if there is none.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from threading import Lock, local

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

from medha.errors import PartFailed
from medha.wire.grammar_limits import CHECK_BYTES, CHECK_SECONDS, CHECK_STACK_BYTES, PARSER_LIMITS
from medha_router.child_pipe import end_child, read_frame, write_frame

KEPT_ANSWERS = 1024
"""Answers that are kept: the requests of an application have few grammars."""

_CHECK, _CONVERT = "?", "="
_CAUSE = "error: "
"""Beginning of the line in which an error of a regular expression names its cause, below a quotation."""
_FIRST_QUESTION = f'{_CHECK}start: "a"'.encode()


class Unchecked(Exception):
    """Grammars have not been checked yet: `GrammarCheck.learn` makes each answer known."""

    def __init__(self, *questions: bytes) -> None:
        super().__init__("a grammar is not checked yet")
        self.questions = questions


class GrammarCheck:
    """Checks grammars; threads may share it. Its process starts with `start`, or else with the first check."""

    def __init__(self, *, waits: bool = True) -> None:
        """Unless it `waits`, it answers only what is known, and raises `Unchecked` otherwise."""
        self._waits = waits
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._answers: dict[bytes, str] = {}  # by digest of the question, the oldest one first
        self._given = local()  # `answers` that this thread has besides

    def start(self) -> None:
        """Start the process that checks and wait for it, so that the first check need not."""
        with suppress(PartFailed):  # the first check then reports it
            self.learn(_FIRST_QUESTION)

    def close(self) -> None:
        """End the process that checks, and a check that it is making."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()  # so that no thread waits for it
        with self._lock:
            if self._process is not None:
                end_child(self._process)
                self._process = None

    def fault(self, grammar: str) -> str | None:
        """Return why ranks cannot follow a grammar, or None.

        Raises:
            PartFailed: the process that checks was lost twice.
            Unchecked: it does not wait, and this is not known.
        """
        return self._answer(_CHECK, grammar)[len(_CHECK) :] or None

    def lark(self, grammar: str) -> str:
        """Return a grammar of GBNF or Lark in the form of llguidance.

        Raises:
            PartFailed: the process that checks was lost twice.
            Unchecked: it does not wait, and this is not known.
            ValueError: it cannot be read.
        """
        answer = self._answer(_CONVERT, grammar)
        if answer.startswith(_CONVERT):
            return answer[len(_CONVERT) :]
        raise ValueError(answer[len(_CHECK) :])

    def learn(self, question: bytes) -> str:
        """Make a check, and keep its answer.

        Raises:
            PartFailed: the process that checks was lost twice.
        """
        with self._lock:
            answer = self._asked(question)
            self.keep({question: answer})
        return answer

    def keep(self, answers: Mapping[bytes, str]) -> None:
        """Keep answers by question; only one thread at a time may call this."""
        for question, answer in answers.items():
            self._answers[_key(question)] = answer
            if len(self._answers) > KEPT_ANSWERS:
                del self._answers[next(iter(self._answers))]

    @contextmanager
    def given(self, answers: Mapping[bytes, str]) -> Iterator[None]:
        """Let this thread use these answers, by question, as well: newer answers may have displaced the kept ones."""
        self._given.answers = {_key(question): answer for question, answer in answers.items()}
        try:
            yield
        finally:
            del self._given.answers

    def _answer(self, wanted: str, grammar: str) -> str:
        question = (wanted + grammar).encode()
        key = _key(question)
        answer = self._answers.get(key)  # without the lock, so that a known answer waits for no check
        if answer is None:
            answer = getattr(self._given, "answers", {}).get(key)
        if answer is None and not self._waits:
            raise Unchecked(question)
        return self.learn(question) if answer is None else answer

    def _asked(self, content: bytes) -> str:
        for _ in range(2):
            if self._closed:
                raise PartFailed("the router is stopping, and checks no more grammars")
            process = self._process = self._process or self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                write_frame(process.stdin, content)
                (answer,) = read_frame(process.stdout, 1)
                return answer.decode()
            except (OSError, EOFError):
                end_child(process)
                self._process = None
        raise PartFailed(
            "the process that checks grammars was lost twice; the router's memory may not suffice"
        )

    def _started(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", __name__]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        weakref.finalize(self, end_child, process)
        return process


def _key(question: bytes) -> bytes:
    return blake2b(question, digest_size=16).digest()


def brief(error: str) -> str:
    """Return the first line of an error of llguidance and its cause, without the long quotations that some have."""
    first, *others = error.split("\n")
    cause = next((line.removeprefix(_CAUSE) for line in others if line.startswith(_CAUSE)), None)
    return first[:300] if cause is None else f"{first[:300]} {cause[:300]}"


class ByteVocabulary:
    """A vocabulary of one token for each byte, and one that ends a text."""

    def __init__(self) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
        self.special_token_ids = [256]
        self.eos_token_id, self.bos_token_id = 256, None

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


# --- the process that checks -------------------------------------------------------------------------


def _serve() -> None:
    """Answer checks until the router closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the router
    tokenizer = LLTokenizer(TokenizerWrapper(ByteVocabulary()), slices=[])
    source = os.fdopen(os.dup(0), "rb", buffering=0)
    sink = os.fdopen(os.dup(1), "wb", buffering=0)
    with suppress(EOFError):
        while True:
            (content,) = read_frame(source, 1)
            write_frame(sink, _done_in_fork(tokenizer, content.decode()).encode())


def _done_in_fork(tokenizer: LLTokenizer, wanted: str) -> str:
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:  # it ends here, whatever happens
        try:
            _limit_this_process()
            with os.fdopen(sink, "wb") as pipe:
                pipe.write(_done(tokenizer, wanted[:1], wanted[1:]).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(sink)
    with os.fdopen(source, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if status == 0:
        return answer.decode()
    return f"{_CHECK}it is nested too deep, or takes more than {CHECK_SECONDS} s or {CHECK_BYTES >> 20} MiB to read"


def _limit_this_process() -> None:
    """Let the kernel end this process when it takes too much."""
    for kind, limit in (
        (resource.RLIMIT_CPU, CHECK_SECONDS),
        (resource.RLIMIT_AS, CHECK_BYTES),
        (resource.RLIMIT_STACK, CHECK_STACK_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, most = resource.getrlimit(kind)
        allowed = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(kind, (allowed, allowed))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stderr.fileno())  # what Rust says as it ends names what the client sent


def _done(tokenizer: LLTokenizer, wanted: str, grammar: str) -> str:
    if wanted == _CHECK:
        return _CHECK + _fault(tokenizer, grammar)
    try:
        return _CONVERT + grammar_from("grammar", grammar)
    except (ValueError, RecursionError) as error:
        return _CHECK + brief(str(error))


def _fault(tokenizer: LLTokenizer, grammar: str) -> str:
    """Return what is wrong with a grammar, "" if nothing is."""
    limits = LLParserLimits(**PARSER_LIMITS._asdict())
    _, problems = LLMatcher.validate_grammar_with_warnings(grammar, None, limits=limits)
    if problems:  # warnings too: they are about tokens that only some models have
        return brief(problems[0])
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    matcher.compute_bitmask()
    return brief(matcher.get_error()) if matcher.is_error() else ""


if __name__ == "__main__":
    _serve()
