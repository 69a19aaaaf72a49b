"""Limits of the grammars of requests, equal in routers, which check grammars, and in ranks, which follow them."""

from __future__ import annotations

from typing import NamedTuple

MAX_GRAMMAR_BYTES = 128 * 2**10
"""Longest grammar of a request; OpenAI's own limit is 120,000 characters of names and values in a schema."""

CHECK_SECONDS = 1
"""Processor time in which a router must have checked a grammar; it bounds what a rank needs to compile it, too."""

CHECK_BYTES = 2**29
"""Address space of the process in which a router checks a grammar."""

CHECK_STACK_BYTES = 4 * 2**20
"""Stack on which a router checks a grammar: llguidance recurses as deep as a grammar is nested."""

COMPILE_STACK_BYTES = 16 * CHECK_STACK_BYTES
"""Stack on which a rank compiles a grammar: what a router let pass never reaches its end."""


class ParserLimits(NamedTuple):
    """Arguments of llguidance's own `LLParserLimits`."""

    max_lexer_states: int = 16_000  # of 1 to 2 kB each: this bounds the memory of a sequence's grammar
    step_lexer_fuel: int = 200_000  # about 14 ms: this bounds the time of one token's mask
    step_max_items: int = 50_000  # about 3 ms
    initial_lexer_fuel: int = 1_000_000  # about 20 ms: this bounds the time of compiling
    verbose_errors: bool = False  # errors go to clients and logs, and a log must not show what clients send


PARSER_LIMITS = ParserLimits()
