"""Separates the thoughts of an output from its answer, if both are one text with marks around the thoughts.

`read` is a pure function of a state and new text. The thoughts and the answer depend only on the characters, not on how
they were cut into pieces. White space around thoughts is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

MOST_HELD_SPACES = 4096
"""Longest white space that is held back because thoughts might end, or begin, after it."""
_SPACE = " \t\r\n"


@dataclass(frozen=True)
class Thought:
    """A piece of a model's thoughts."""

    text: str


class Phase(Enum):
    """The place of the next character."""

    UNDECIDED = "undecided"
    """The output may begin with thoughts."""
    BEGUN = "begun"
    """In thoughts that are empty so far."""
    THINKING = "thinking"
    AFTER = "after"
    """Between the thoughts and the answer."""
    ANSWER = "answer"

    @property
    def is_in_thoughts(self) -> bool:
        return self in (Phase.BEGUN, Phase.THINKING)


@dataclass(frozen=True)
class ThoughtState:
    """All that is remembered of the text before."""

    phase: Phase
    held: str = ""
    """Text that is not read yet, because it may be a part of a mark or white space around thoughts."""


@dataclass(frozen=True)
class ThoughtMarks:
    """The marks around thoughts."""

    opens: str
    closes: str


Read = tuple[ThoughtState, list[Thought | str]]


def read(marks: ThoughtMarks, state: ThoughtState, text: str) -> Read:
    """Return the state after `text`, and the thoughts and text of the answer that are certain by now."""
    found: list[Thought | str] = []
    state = replace(state, held=state.held + text)
    while state.held:
        before = state
        match state.phase:
            case Phase.UNDECIDED:
                state = _begin(marks, state)
            case Phase.BEGUN:
                state = _lead(marks, state)
            case Phase.THINKING:
                state, thought = _think(marks, state)
                if thought:
                    found.append(Thought(thought))
            case Phase.AFTER:
                rest = state.held.lstrip(_SPACE)
                state = ThoughtState(Phase.ANSWER if rest else Phase.AFTER, rest)
            case Phase.ANSWER:
                found.append(state.held)
                state = replace(state, held="")
        if state == before:
            break
    return state, found


def read_end(state: ThoughtState) -> Read:
    """Return the state at the end of an output, and what was held back."""
    found: list[Thought | str] = []
    if state.held and state.phase in (Phase.UNDECIDED, Phase.ANSWER):
        return ThoughtState(Phase.ANSWER), [state.held]
    if thought := state.held.strip(_SPACE):
        found.append(Thought(state.held if state.phase is Phase.THINKING else thought))
    return replace(state, held=""), found


def _begin(marks: ThoughtMarks, state: ThoughtState) -> ThoughtState:
    rest = state.held.lstrip(_SPACE)
    is_short = len(state.held) - len(rest) <= MOST_HELD_SPACES
    if is_short and rest.startswith(marks.opens):
        return ThoughtState(Phase.BEGUN, rest[len(marks.opens) :])
    if is_short and marks.opens.startswith(rest):
        return state
    return replace(state, phase=Phase.ANSWER)


def _lead(marks: ThoughtMarks, state: ThoughtState) -> ThoughtState:
    """Drop white space before thoughts, and a second opening mark, which models write after some prompts."""
    rest = state.held.lstrip(_SPACE)
    if rest.startswith(marks.opens):
        return ThoughtState(Phase.BEGUN, rest[len(marks.opens) :])
    is_open = marks.opens.startswith(rest) or (marks.closes.startswith(rest) and rest != marks.closes)
    return ThoughtState(Phase.BEGUN if is_open else Phase.THINKING, rest)


def _think(marks: ThoughtMarks, state: ThoughtState) -> tuple[ThoughtState, str]:
    """Return the state after the held thoughts, and those that can be shown."""
    text = state.held
    end = text.find(marks.closes)
    if end >= 0:
        shown = text[: _last_shown(text[:end])]
        return ThoughtState(Phase.AFTER, text[end + len(marks.closes) :]), shown
    begun = next(
        (length for length in range(len(marks.closes) - 1, 0, -1) if text.endswith(marks.closes[:length])), 0
    )
    place = _last_shown(text[: len(text) - begun])
    return replace(state, held=text[place:]), text[:place]


def _last_shown(text: str) -> int:
    """Return the length of the part of a text to show: white space at its end is held back, up to `MOST_HELD_SPACES`."""
    spaces = len(text) - len(text.rstrip(_SPACE))
    return len(text) - spaces % (MOST_HELD_SPACES + 1)


class ThoughtReader:
    """Reads one output; `feed` it, then `end` it."""

    def __init__(self, marks: ThoughtMarks, begins: Phase) -> None:
        self._marks = marks
        self._state = ThoughtState(begins)

    @property
    def phase(self) -> Phase:
        return self._state.phase

    @property
    def held_characters(self) -> int:
        return len(self._state.held)

    def feed(self, text: str) -> list[Thought | str]:
        self._state, found = read(self._marks, self._state, text)
        return found

    def end(self) -> list[Thought | str]:
        self._state, found = read_end(self._state)
        return found
