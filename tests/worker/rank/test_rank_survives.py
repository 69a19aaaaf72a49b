"""Errors of a rank that has others end the epoch; some end the process."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from medha.errors import ConfigInvalid, PartFailed
from medha.wire.messages import RankFault
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


def test_results_of_a_step_in_which_a_rank_was_lost_are_not_sent() -> None:
    rank, engine, step = MagicMock(), MagicMock(), MagicMock(predicted_seconds=0.1)
    engine.grid.rank = engine.grid.sampling_rank = 0
    engine.grid.begin_step.return_value = 0.1
    Rank._run_step(rank, engine, step)
    rank._prefetcher.send.assert_called_once_with(engine.executor.run.return_value)
    rank._prefetcher.send.reset_mock()
    engine.grid.end_step.side_effect = PartFailed("rank 1 left")
    with pytest.raises(PartFailed, match="rank 1 left"):
        Rank._run_step(rank, engine, step)
    assert engine.executor.run.call_count == 2
    rank._prefetcher.send.assert_not_called()


def sent_by(act: Any) -> RankFault:
    """Return what a rank sends to its controller, whose GPU has reported an error."""
    sent: list[RankFault] = []
    rank: Any = SimpleNamespace(
        _settings=SimpleNamespace(rank=1),
        _reports=SimpleNamespace(recent_xid=lambda: "; its GPU reported Xid 48"),
        _prefetcher=SimpleNamespace(send=sent.append),
        _leave=lambda: None,
    )
    act(rank)
    (fault,) = sent
    return fault


def test_a_loss_and_an_end_name_the_error_of_the_gpu() -> None:
    lost = sent_by(lambda rank: Rank._lose(rank, 7, "RuntimeError: CUDA error"))
    assert lost == RankFault(1, "RuntimeError: CUDA error; its GPU reported Xid 48", lost_epoch=7)
    ended = sent_by(lambda rank: Rank.report(rank, RuntimeError("CUDA error")))
    assert ended == RankFault(1, "RuntimeError: CUDA error; its GPU reported Xid 48")
