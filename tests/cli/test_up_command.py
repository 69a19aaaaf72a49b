"""`medha up` with the real parts: it serves, and however it ends, nothing is left."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
import trustme
from click.testing import CliRunner

from medha_cli.main import main

MANIFEST = """\
apiVersion: medha.dev/v1alpha1
kind: MedhaReplica
metadata: {name: real}
spec:
  model: {name: tiny, source: {path: tiny}, maxModelLen: 2048}
  kvCache: {size: 8Mi}
  router: {port: 0}
  threads: 1
"""


def command(manifest: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "medha_cli.main", "up", str(manifest), *options]


class Up:
    """A running `medha up`, read until it is ready, or has printed `until`. It may have 256 files open at first."""

    def __init__(self, manifest: Path, folder: Path, *options: str, until: str = "Ctrl-C drains") -> None:
        self.process = subprocess.Popen(
            ["sh", "-c", 'ulimit -Sn 256; exec "$@"', "sh", *command(manifest, *options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        self.output = ""
        self.until(until)

    def until(self, text: str) -> None:
        """Read until `text` was printed; the test's own timeout bounds it."""
        assert self.process.stdout is not None
        while text not in self.output:
            line = self.process.stdout.readline()
            assert line, self.output
            self.output += line
        self.parts = psutil.Process(self.process.pid).children(recursive=True)

    def url(self) -> str:
        found = re.search(r"http://127\.0\.0\.1:\d+", self.output[self.output.index("is ready") :])
        assert found
        return found[0]

    def end(self) -> int:
        assert self.process.stdout is not None
        self.output += self.process.stdout.read()
        return self.process.wait(timeout=30)

    def left(self) -> list[psutil.Process]:
        return psutil.wait_procs(self.parts, timeout=10)[1]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("up")
    with pytest.raises(SystemExit, match="0"):
        main(["model", "init", str(folder / "tiny")])
    (folder / "real.yaml").write_text(MANIFEST)
    return folder / "real.yaml"


@pytest.fixture
def up(manifest: Path, tmp_path: Path) -> Iterator[Up]:
    running = Up(manifest, tmp_path, "--record", str(tmp_path / "events.jsonl"))
    yield running
    clear(running)


def clear(running: Up) -> None:
    """End what a test that has failed may have left."""
    for process in running.parts:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    running.process.kill()
    running.process.wait(timeout=10)
    assert running.process.stdout is not None
    running.process.stdout.close()


def test_it_shows_a_url_that_answers_and_stops_on_ctrl_c_without_a_trace(up: Up, tmp_path: Path) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    headers = {"x-request-id": "my-trace-7"}
    response = httpx.post(up.url() + "/v1/chat/completions", json=body, headers=headers, timeout=60)
    answer = response.raise_for_status().json()
    assert answer["usage"]["completion_tokens"] <= 3
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 0
    assert up.left() == []
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "events.jsonl") == []
    record = (tmp_path / "events.jsonl").read_text()
    assert '"type":"Submit"' in record
    assert f'"id":"{answer["id"]}-0"' in record
    assert answer["id"].startswith("chatcmpl-my-trace-7-")
    assert "POST /v1/chat/completions 200 id=my-trace-7 model=tiny outcome=" in up.output


@pytest.mark.long
def test_clients_with_keys_are_served_by_tls_and_share_no_cached_prompt(
    manifest: Path, tmp_path: Path
) -> None:
    file, certificate, key = (tmp_path / name for name in ("keys.yaml", "tls.crt", "tls.key"))
    alice, bob = (
        CliRunner().invoke(main, ["keys", "add", name, "--file", str(file)]).stdout.strip()
        for name in ("alice", "bob")
    )
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    certificate.write_bytes(issued.cert_chain_pems[0].bytes())
    key.write_bytes(issued.private_key_pem.bytes())
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    options = ("--api-keys", str(file), "--tls-certificate", str(certificate), "--tls-key", str(key))
    running = Up(manifest, tmp_path, *options)
    try:
        url = re.search(r"https://127\.0\.0\.1:\d+", running.output)
        assert url
        with httpx.Client(base_url=url[0], verify=trusting, timeout=60) as http:

            def cached(secret: str) -> int:
                body = {"model": "tiny", "prompt": list(range(5, 205)), "max_tokens": 1}
                answer = http.post(
                    "/v1/completions", json=body, headers={"Authorization": f"Bearer {secret}"}
                )
                return int(
                    answer.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                )

            assert (cached(alice), cached(bob)) == (0, 0)
            assert cached(alice) == cached(bob) > 0
            assert http.get("/v1/models").status_code == 401
        running.process.send_signal(signal.SIGINT)
        assert running.end() == 0
    finally:
        clear(running)
    for secret in (alice, bob):
        assert secret not in running.output
    assert " key=alice " in running.output


@pytest.mark.long
def test_it_does_not_compute_on_the_cpu_if_its_manifest_names_a_gpu_that_is_not_there(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default of the field, `nvidia.com/gpu`, is for pods: the other manifests here do not name it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hides those of this machine, if it has any
    asking = manifest.with_name("asking.yaml")
    asking.write_text(f"{MANIFEST}  resources: {{accelerator: nvidia.com/gpu}}\n")
    running = Up(asking, tmp_path, until="error:")
    try:
        assert running.end() == 1
        assert "because: spec.resources.accelerator is nvidia.com/gpu, but " in running.output
        assert re.search("unset it|accelerator none", running.output), (
            "the fix: without a variable, or with another build"
        )
        assert running.left() == []
    finally:
        clear(running)


def test_what_it_has_recorded_replays_and_is_simulated_under_other_policies(up: Up, tmp_path: Path) -> None:
    url = up.url() + "/v1/completions"

    def complete(prompt: str) -> None:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 12}
        httpx.post(url, json=body, timeout=60).raise_for_status()

    prompts = ["a b c " * 40, "a b c " * 40, "a b c " * 200, "x", "y" * 900]
    with ThreadPoolExecutor() as pool:
        list(pool.map(complete, prompts))
    leaving = {"model": "tiny", "prompt": "z", "max_tokens": 1500, "stream": True}
    with httpx.stream("POST", url, json=leaving, timeout=60) as stream:
        next(stream.iter_lines())  # and its client goes away
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 0
    record, page = tmp_path / "events.jsonl", tmp_path / "replay.html"
    replayed = CliRunner().invoke(main, ["replay", str(record), "-p", "fcfs", "-o", str(page)])
    assert replayed.exit_code == 0, replayed.output
    assert "the same commands" in replayed.output
    found = json.loads(page.with_suffix(".json").read_text())
    reported = {run["system"]: run["result"]["all"] for run in found["runs"]}
    assert [run["seed"] for run in found["runs"] if run["system"] == "fcfs"] == [0, 1, 2, 3, 4]
    in_time = next(one for one in found["differences"] if one["figure"] == "short: TTFT in time")
    assert (in_time["system"], in_time["less"], in_time["seeds"]) == ("fcfs", "guarded, as live", 5)
    assert "fcfs - guarded, as live" in replayed.output
    assert [one["arrived"] for one in reported.values()] == 3 * [len(prompts) + 1]
    assert reported["recorded"]["finished"] == len(prompts) + 1
    another = tmp_path / "another.jsonl"
    another.write_text(record.read_text().replace('"max_tokens":12', '"max_tokens":5'))
    assert another.read_text() != record.read_text()
    differs = CliRunner().invoke(main, ["replay", str(another)])
    assert isinstance(differs.exception, SystemExit)
    assert "which is not what was commanded live" in differs.output


def test_a_rank_that_is_killed_is_started_again_and_all_ends_well(up: Up) -> None:
    """All parts may open as many files as the machine allows, also the one that is started again."""
    killed = next(part for part in up.parts if "medha_worker.rank" in part.cmdline())
    killed.kill()
    up.until("epoch 1 begins")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = {
        part.pid: part.rlimit(psutil.RLIMIT_NOFILE) for part in [psutil.Process(up.process.pid), *up.parts]
    }
    assert killed.pid not in limits
    assert set(limits.values()) == {(hard, hard)}
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 0
    assert "rank 0 was killed by SIGKILL" in up.output
    assert up.left() == []


def test_nothing_outlives_a_supervisor_that_is_killed(up: Up, tmp_path: Path) -> None:
    assert [path for path in tmp_path.iterdir() if (path / "keys").is_dir()]
    up.process.kill()
    assert up.left() == []
    assert [path.name for path in tmp_path.iterdir()] == ["events.jsonl"]


@pytest.mark.long
def test_a_second_interrupt_kills_while_a_request_is_open_and_leaves_nothing(up: Up, tmp_path: Path) -> None:
    body = {"model": "tiny", "prompt": "z", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", up.url() + "/v1/completions", json=body, timeout=60) as stream:
        next(stream.iter_lines())
        up.process.send_signal(signal.SIGSTOP)  # so that it finds both at once
        up.process.send_signal(signal.SIGINT)
        up.process.send_signal(signal.SIGTERM)
        up.process.send_signal(signal.SIGCONT)
        assert up.end() == 130
    assert up.left() == []
    assert [path.name for path in tmp_path.iterdir()] == ["events.jsonl"]


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("starting real", signal.SIGHUP),
        pytest.param("starting real", signal.SIGINT, marks=pytest.mark.long),
        pytest.param("starting real", signal.SIGTERM, marks=pytest.mark.long),
        ("loading LlamaForCausalLM", signal.SIGINT),
        pytest.param("loading LlamaForCausalLM", signal.SIGHUP, marks=pytest.mark.long),
        pytest.param("loading LlamaForCausalLM", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_a_signal_while_it_starts_ends_it_and_leaves_nothing(
    manifest: Path, tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    up = Up(manifest, tmp_path, until=moment)
    try:
        up.process.send_signal(number)
        assert up.end() == 0
        assert "stopping before the replica was ready" in up.output
        assert up.left() == []
        assert list(tmp_path.iterdir()) == []
    finally:
        clear(up)


@pytest.mark.long
def test_in_a_terminal_it_shows_how_far_it_is_and_a_closed_terminal_ends_it(
    manifest: Path, tmp_path: Path
) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"TMPDIR": str(tmp_path), "TERM": "xterm", "COLUMNS": "200"}
        os.execv(sys.executable, command(manifest))  # noqa: S606 (pty.fork wants it)
    shown = b""
    while b"Ctrl-C drains" not in shown:
        shown += os.read(terminal, 65_536)
    parts = psutil.Process(pid).children(recursive=True)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert psutil.wait_procs(parts, timeout=10)[1] == []
    assert list(tmp_path.iterdir()) == []
    assert re.search(rb"warms up: step \d+ of \d+, ", shown)
    assert re.search(rb"\d\d:\d\d:\d\d\.\d{3} .*router ", shown)


SEND = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
sender.setblocking(False)
address = sys.argv[1].replace("@", "\\0")
sender.sendto(b"STOP", address)
while True:
    try:
        sender.sendto(b"x", address)
    except BlockingIOError:
        pass
"""


@pytest.mark.long
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_cannot_keep_it_from_ending(up: Up, tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755)
    address = up.parts[-1].environ()["NOTIFY_SOCKET"]
    sender = [sys.executable, "-S", "-c", SEND, address]
    with subprocess.Popen(sender, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as attacker:
        up.process.send_signal(signal.SIGINT)
        try:
            assert up.end() == 0
            assert up.left() == []
        finally:
            attacker.kill()
        assert attacker.stderr is not None
        assert "PermissionError" in attacker.stderr.read()
    assert [path.name for path in tmp_path.iterdir()] == ["events.jsonl"]
