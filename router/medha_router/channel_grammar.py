"""The grammar of an output with channels: the answer follows a grammar, and thoughts before it are free text.

It is written in llguidance's dialect of Lark. Marks that are special tokens of the model are named by their ids, because
text in a grammar never stands for special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from medha_router.channels import BEGUN, CHANNEL, CONSTRAIN, END, MESSAGE, START

ANY = r"(.|\n)*"
"""Regular expression of any text."""
OPTIONS = "%llguidance {}"
"""First line of a grammar."""
THOUGHTS = "analysis*"
THOUGHTS_AND_PREAMBLES = "(analysis | preamble)*"
"""Messages before the one that ends an output. A preamble is for the user, as the answer is."""


def piece(text: str, special_ids: Mapping[str, int]) -> str:
    """Return the symbol of a text, which may be one of the special tokens."""
    number = special_ids.get(text)
    return json.dumps(text) if number is None else f"<[{number}]>"


def channel_rules(special_ids: Mapping[str, int]) -> list[str]:
    """Return the rules of messages: `analysis` and `preamble` are whole, and `final` is the header of the answer."""
    start, channel, message, end, constrain = (
        piece(mark, special_ids) for mark in (START, CHANNEL, MESSAGE, END, CONSTRAIN)
    )
    said = "said" if END in special_ids else "said[lazy]"  # a lazy lexeme ends with its first mark
    return [
        f"TEXT: /{ANY}/",
        f"{said}: TEXT {end}",
        f"next: {start} {json.dumps(BEGUN)}",
        f'analysis: {channel} "analysis" {message} said next',
        f'preamble: {channel} "commentary" {message} said next',
        f'final: {channel} "final" (" "? {constrain} "json")? {message}',
    ]


def in_channels(grammar: str, special_ids: Mapping[str, int]) -> str:
    """Return the grammar of an output whose answer follows `grammar`, with any thoughts before it."""
    return answer_after_lead(f"{THOUGHTS} final", channel_rules(special_ids), grammar)


def answer_after_lead(lead: str, rules: list[str], grammar: str) -> str:
    """Return the grammar of an output with an answer of `grammar` after `lead`, which these rules define."""
    whole = "\n".join([OPTIONS, f"start: {lead} @answer", *rules]) + "\n"
    inner = json.loads(grammar) if grammar.lstrip().startswith("{") else {}
    first, *others = inner.get("grammars", [{"lark_grammar": grammar}])
    return json.dumps({**inner, "grammars": [{"lark_grammar": whole}, {**first, "name": "answer"}, *others]})
