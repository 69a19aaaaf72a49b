"""The grammar of thoughts between marks: thoughts are free text, and the answer after them follows its own grammar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from medha_router.channel_grammar import ANY, answer_after_lead, piece
from medha_router.thought_text import ThoughtMarks


@dataclass(frozen=True)
class ThoughtGrammar:
    """Thoughts with which an output begins; they are open already if the prompt ends with the mark that opens them."""

    marks: ThoughtMarks
    is_open: bool

    @property
    def lead(self) -> str:
        """The symbols before the answer. Thoughts that the prompt has not opened may be missing."""
        return "thoughts" if self.is_open else "thoughts?"

    def rules(self, special_ids: Mapping[str, int], *, after_space: bool = False) -> list[str]:
        """Return the rules of `lead`; `special_ids` are the marks that are special tokens.

        With `after_space`, white space may go before thoughts, as it may before an answer that is any text.
        """
        opens, closes = (piece(mark, special_ids) for mark in (self.marks.opens, self.marks.closes))
        if after_space:
            opens = f"AROUND_THOUGHTS? {opens}"
        # A lazy lexeme ends with its first mark. Inside one, the mark at its start is preferred to other text.
        thought = "thought" if self.marks.closes in special_ids else "thought[lazy]"
        return [
            f"THOUGHT: /{ANY}/",
            f"{thought}: THOUGHT {closes}" if self.is_open else f"{thought}: {opens} THOUGHT {closes}",
            r"AROUND_THOUGHTS: /[ \t\r\n]{1,8}/",
            "thoughts: thought AROUND_THOUGHTS?",
        ]

    def without(self, special_ids: Mapping[str, int]) -> str:
        """Return the condition that a lexeme of free text does not begin with thoughts, "" if none is needed."""
        if self.is_open or self.marks.opens in special_ids:
            return ""
        return rf" & ~/[ \t\r\n]*{escaped(self.marks.opens)}{ANY}/"

    def before(self, grammar: str, special_ids: Mapping[str, int]) -> str:
        """Return the grammar of an output whose answer follows `grammar`."""
        return answer_after_lead(self.lead, self.rules(special_ids), grammar)


def escaped(text: str) -> str:
    """Return a text as a regular expression."""
    return "".join(char if char.isalnum() else f"\\x{ord(char):02x}" for char in text)
