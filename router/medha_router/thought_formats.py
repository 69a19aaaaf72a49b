"""The forms in which families of models write their thoughts, by name, and which of them a checkpoint's template uses."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from medha.api.declared import AUTO
from medha_router.channels import CHANNEL
from medha_router.thought_text import Phase, ThoughtMarks, ThoughtReader

NO_THOUGHTS = "none"
"""The setting of a model whose thoughts are not read."""
FORMS: Mapping[str, ThoughtMarks | None] = MappingProxyType(
    {
        "think": ThoughtMarks("<think>", "</think>"),
        "mistral": ThoughtMarks("[THINK]", "[/THINK]"),
        "harmony": None,
    }
)
"""The values of `spec.model.reasoningFormat` beside `auto` and `none`; None: the thoughts are messages in a channel."""


def form_of_thoughts(template: str, setting: str) -> str | None:
    """Return the name of the form of a model's thoughts, None if it has none; `setting` is its manifest's.

    An unknown setting, which a newer release may have, counts as `auto`.
    """
    if setting == NO_THOUGHTS:
        return None
    return setting if setting != AUTO and setting in FORMS else _detected(template)


def _detected(template: str) -> str | None:
    if CHANNEL in template:
        return "harmony"
    return next((name for name, marks in FORMS.items() if marks and marks.closes in template), None)


def place_after(prompt: str, marks: ThoughtMarks) -> Phase:
    """Return the phase in which an output begins: at the end of the prompt, the template may have opened or closed
    thoughts."""
    end = prompt[-1024:].rstrip()
    if end.endswith(marks.opens):
        return Phase.BEGUN
    return Phase.ANSWER if end.endswith(marks.closes) else Phase.UNDECIDED


def place_within(message: str, marks: ThoughtMarks) -> Phase:
    """Return where the continuation of a message begins. The message is read as an output: marks in an answer are text."""
    reader = ThoughtReader(marks, Phase.UNDECIDED)
    reader.feed(message)
    return reader.phase
