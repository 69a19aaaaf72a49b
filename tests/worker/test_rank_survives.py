"""Errors of a rank that has others end the epoch; some end the process."""

from types import SimpleNamespace
from typing import Any

import pytest

from medha.errors import ConfigInvalid, PartFailed
from medha_worker.rank.process import Rank


def lost_by(error: Exception, *, ranks: int = 2, engine: object = "serves") -> list[tuple[int, str]]:
    """Return the epochs that are lost, with the reasons, if `error` is raised in epoch 7."""
    lost: list[tuple[int, str]] = []
    rank: Any = SimpleNamespace(
        _settings=SimpleNamespace(topology=SimpleNamespace(ranks=ranks)),
        _engine=engine,
        _lose=lambda epoch, reason: lost.append((epoch, reason)),
    )
    with Rank._surviving(rank, 7):
        raise error
    return lost


@pytest.mark.parametrize(
    "error", [KeyError("a"), ValueError("no"), IndexError("out"), RuntimeError("gloo"), PartFailed("parted")]
)
def test_whatever_a_step_raises_costs_the_epoch_and_not_the_process(error: Exception) -> None:
    assert lost_by(error) == [(7, f"{type(error).__name__}: {error}")]


def test_who_does_not_find_the_others_waits_for_the_next_call() -> None:
    assert lost_by(RuntimeError("nobody came"), engine=None) == [(7, "RuntimeError: nobody came")]


@pytest.mark.parametrize(
    ("error", "engine", "ranks"),
    [
        pytest.param(KeyError("a"), None, 2, id="a bug while nobody's request is here"),
        pytest.param(ConfigInvalid("too small"), None, 2, id="settings, while meeting"),
        pytest.param(ConfigInvalid("too small"), "serves", 2, id="settings, in a step"),
        pytest.param(KeyError("a"), "serves", 1, id="a rank that is alone"),
    ],
)
def test_what_would_come_again_and_again_ends_the_process(
    error: Exception, engine: object, ranks: int
) -> None:
    with pytest.raises(type(error)):
        lost_by(error, engine=engine, ranks=ranks)
