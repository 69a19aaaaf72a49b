"""A run of `medha up` is found while it lasts, and never when it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from medha.errors import ConfigInvalid
from medha_cli.replica_snapshot import Target
from medha_cli.runs import KEYS, RUN_FILE, announced, find, remove_ended, running
from medha_cli.up_command import _run_directory


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary directory, without the runs of others."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def directory(parent: Path, name: str = "medha-abc") -> Path:
    (parent / name).mkdir()
    return parent / name


def test_a_run_is_found_by_itself_and_only_while_it_lasts(temporary: Path) -> None:
    run = directory(temporary)
    with announced(run, "grid"):
        (found,) = running()
        assert (found.name, found.directory) == ("grid", run)
        assert (find(None, None), find("grid", None), find(None, run)) == (found, found, found)
        assert found.lasts()
    assert not found.lasts()
    assert running() == []
    assert list(run.iterdir()) == []


def test_a_run_in_a_directory_of_the_users_own_choice_is_found_too(temporary: Path) -> None:
    run = directory(directory(temporary, "elsewhere"), "mine")
    with announced(run, "grid"):
        assert [found.directory for found in running()] == [run]
    assert [path.name for path in temporary.iterdir()] == ["elsewhere"]


def test_names_that_others_have_planted_hold_nobody_up_and_are_no_runs(temporary: Path) -> None:
    """Anybody may write to the temporary directory: a pipe without a writer, a device without an end, a link to a run."""
    run = directory(temporary, "medha-mine")
    os.mkfifo(directory(temporary, "medha-pipe") / RUN_FILE)
    (directory(temporary, "medha-device") / RUN_FILE).symlink_to("/dev/zero")
    with announced(run, "grid"):
        (directory(temporary, "medha-link") / RUN_FILE).symlink_to(run / RUN_FILE)
        remove_ended()
        assert [found.directory for found in running()] == [run]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_run_file_in_a_directory_of_somebody_else_is_none_of_ours(temporary: Path) -> None:
    run = directory(temporary)
    with announced(run, "grid"):
        os.chown(run, 65534, 65534)
        assert running() == []


def left_by_a_killed_one(run: Path, *, is_temporary: bool = False) -> None:
    code = (
        "import sys, time; from pathlib import Path; from medha_cli.runs import announced\n"
        "with announced(Path(sys.argv[1]), 'grid', is_temporary=sys.argv[2] == 'True'):\n    print('here', flush=True); time.sleep(60)"
    )
    environment = os.environ | {"TMPDIR": tempfile.gettempdir()}
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(run), str(is_temporary)], stdout=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"here\n"
    assert [found.pid for found in running()] == [process.pid]
    process.kill()
    process.wait()
    process.stdout.close()


def test_what_a_killed_run_has_left_is_no_run(temporary: Path) -> None:
    run = directory(temporary)
    left_by_a_killed_one(run)
    assert (run / RUN_FILE).exists()
    assert running() == []


def test_the_next_run_removes_what_killed_ones_have_left_and_their_keys(temporary: Path) -> None:
    ended, lasting, strange, named = (
        directory(temporary, f"medha-{name}") for name in ("1", "2", "3", "mine")
    )
    chosen = directory(directory(temporary, "elsewhere"), "mine")
    for run in (ended, lasting, strange, named, chosen):
        (run / KEYS).mkdir()
    (named / "events.jsonl").touch()
    left_by_a_killed_one(ended, is_temporary=True)
    for run in (named, chosen):
        left_by_a_killed_one(run)
    with announced(lasting, "grid"):
        remove_ended()
        assert sorted(path.name for path in temporary.iterdir()) == [
            "elsewhere", "medha-2", "medha-3", "medha-mine",
        ]  # fmt: skip
        assert sorted(path.name for path in lasting.iterdir()) == [KEYS, RUN_FILE]
    assert list(strange.iterdir()) == [strange / KEYS], "it was no run's"
    assert list(chosen.iterdir()) == [], "the user's own directory stays"
    assert list(named.iterdir()) == [named / "events.jsonl"], "whatever it is called, and what is in it"


def test_with_none_or_several_runs_the_error_names_the_fix(temporary: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"no running medha up.*start one .medha up FILE.*--url"):
        find(None, None)
    one, other = directory(temporary, "medha-1"), directory(temporary, "medha-2")
    with announced(one, "chat"), announced(other, "books"):
        with pytest.raises(
            ConfigInvalid, match=f"2 replicas.*books: --run-dir {other}; chat: --run-dir {one}"
        ):
            find(None, None)
        with pytest.raises(ConfigInvalid, match="no replica named 'x'"):
            find("x", None)
        assert find("books", None).directory == other
    with pytest.raises(ConfigInvalid, match="no medha up of yours runs there"):
        find(None, one)


def test_two_runs_cannot_share_a_directory(temporary: Path) -> None:
    run = directory(temporary)
    with (
        announced(run, "first"),
        pytest.raises(ConfigInvalid, match="still runs; name another"),
        announced(run, "second"),
    ):
        pass


def test_a_second_run_in_a_directory_leaves_the_first_ones_files_alone(temporary: Path) -> None:
    run = directory(temporary)
    (run / "ranks-ready.json").write_text("{}")
    with announced(run, "first"):
        before = sorted(path.name for path in run.iterdir())
        with pytest.raises(ConfigInvalid, match="still runs; name another"), _run_directory(run):
            pytest.fail("it was taken")
        assert sorted(path.name for path in run.iterdir()) == before
    with _run_directory(run):
        assert not (run / "ranks-ready.json").exists()


def test_the_addresses_of_a_run_are_those_that_its_parts_have_written_last(temporary: Path) -> None:
    run = directory(temporary)
    with announced(run, "grid"):
        found = find(None, None)
        assert (found.telemetry_url(), found.router_metrics_url()) == (None, None)
        for port in (1, 2):  # a controller that is replaced listens elsewhere
            (run / "ranks-ready.json").write_text(
                json.dumps({"metrics_url": f"http://127.0.0.1:{port}/metrics"})
            )
            assert found.telemetry_url() == f"http://127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("127.0.0.1:9100", "http://127.0.0.1:9100"),
        ("http://[::1]:9100/metrics", "http://[::1]:9100"),
        ("https://example.org/status?x=1", "https://example.org"),
    ],
)
def test_an_address_may_be_given_with_or_without_its_page(given: str, address: str) -> None:
    assert Target(None, None, given).controller_url() == address


def test_what_is_no_address_or_more_than_one_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="--url is 'ftp://x'"):
        Target(None, None, "ftp://x")
    with pytest.raises(ConfigInvalid, match="give one of them"):
        Target("grid", None, "127.0.0.1:1")
