"""The models that a router knows: from manifests, and from what replicas announced."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from medha.api.declared import AUTO, DeclaredModel, usable_aliases
from medha.slo import FALLBACK_TERMS
from medha.wire.messages import Announce


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that a manifest names or that a replica has announced, whether or not anything serves it now."""

    service_classes: tuple[str, ...]
    """Names of the service classes, at least one; the first is the default."""
    desired_replicas: int | None = None
    """Replicas that the manifests ask for; None if the model is known from announcements only."""


class KnownModels:
    """All known models. One that manifests no longer name is forgotten once the last of its replicas has gone."""

    def __init__(self) -> None:
        self._declared: dict[str, DeclaredModel] = {}
        self._aliases: dict[str, str] = {}  # alias -> model
        self._announced: dict[str, tuple[str, ...]] = {}  # model -> its service classes, as last announced
        self._announced_at: dict[str, float] = {}  # the time of that
        self._withdrawn: set[str] = set()  # announced models that no manifest names any more

    def __bool__(self) -> bool:
        return bool(self._declared or self._announced)

    def declare(self, models: Iterable[DeclaredModel]) -> None:
        before, self._declared = self._declared, {model.name: model for model in models}
        self._aliases, _ = usable_aliases(self._declared.values())
        self._withdrawn = (self._withdrawn | before.keys()) - self._declared.keys()

    def announce(self, card: Announce, now: float) -> None:
        self._announced_at[card.model] = now
        self._announced[card.model] = tuple(terms.name for terms in card.service_classes)

    def forget_withdrawn(self, present: Iterable[str]) -> None:
        """Forget models that were withdrawn and have no replica; `present` names those that have one."""
        if self._withdrawn:
            kept = self._withdrawn.intersection(present)
            for model in self._withdrawn - kept:
                self._announced.pop(model, None)
                self._announced_at.pop(model, None)
            self._withdrawn = kept

    def find(self, model: str) -> KnownModel | None:
        """Return what is known of a model, or None.

        If nothing serves a known model, that is an outage, not a wrong name.
        """
        declared, announced = self._declared.get(model), self._announced.get(model)
        if declared is None and announced is None:
            return None
        classes = announced or (declared.service_classes if declared is not None else ())
        wanted = declared.replicas if declared is not None else None
        return KnownModel(classes or (FALLBACK_TERMS.name,), wanted)

    @property
    def declared(self) -> tuple[DeclaredModel, ...]:
        """The models that manifests name."""
        return tuple(self._declared.values())

    def is_expected(self, model: str, now: float, name_seconds: float) -> bool:
        """Return whether replicas of a model may come: a manifest names it, or may do so as far as this router knows.

        The name of a new model may arrive up to `name_seconds` after its replicas, and they may have gone by then.
        """
        if model in self._declared:
            return True
        return model not in self._withdrawn and now - self._announced_at.get(model, -inf) <= name_seconds

    @property
    def aliases(self) -> dict[str, str]:
        """Aliases of declared models, as alias -> model; one that is the name of an announced model is left out."""
        return {alias: model for alias, model in self._aliases.items() if alias not in self._announced}

    def tool_call_format(self, model: str) -> str:
        """Return the form of a model's calls of functions, as its manifest names it."""
        declared = self._declared.get(model)
        return AUTO if declared is None else declared.tool_call_format

    def reasoning_format(self, model: str) -> str:
        """Return the form of a model's thoughts, as its manifest names it."""
        declared = self._declared.get(model)
        return AUTO if declared is None else declared.reasoning_format

    def all(self) -> dict[str, KnownModel]:
        """Return every model that a manifest names or that was announced, by name."""
        return {name: found for name in self.names if (found := self.find(name)) is not None}

    @property
    def names(self) -> list[str]:
        return sorted({*self._declared, *self._announced})
