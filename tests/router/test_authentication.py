"""API keys, asked for with the real client of OpenAI's, from a file that is swapped as a kubelet swaps a Secret."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from medha.wire.messages import Emit
from medha_links.key_files import KeyFiles
from medha_process.router_settings import RouterSettings
from medha_router.tokenizer_bundle import Bundle
from medha_router.watched_files import WatchedFiles

from .conftest import MODEL, Router, Script, ScriptedReplica, running_router, say, wait_for

SAID = "one two three four"


class MountedSecret:
    """The folder of a Secret's volume: `..data` names a folder of this version, and is replaced by a new link."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._version = 0
        folder.mkdir()
        self.file = folder / "keys.yaml"
        self.file.symlink_to("..data/keys.yaml")

    def swap(self, content: str | None) -> None:
        """Show another content; None: the Secret has lost its entry."""
        self._version += 1
        new = self._folder / f"..{self._version}"
        new.mkdir()
        if content is not None:
            (new / "keys.yaml").write_text(content)
        link = self._folder / "..data_tmp"
        link.symlink_to(new.name)
        link.rename(self._folder / "..data")


def entry(name: str, *secrets: str, **limits: Any) -> dict[str, Any]:
    return {"name": name, "sha256": [hashlib.sha256(one.encode()).hexdigest() for one in secrets], **limits}


def keys(*entries: dict[str, Any]) -> str:
    return yaml.safe_dump({"keys": entries})


@dataclass
class Served:
    router: Router
    replica: ScriptedReplica
    secret: MountedSecret
    openai: openai.OpenAI

    def client(self, key: str) -> openai.OpenAI:
        return self.openai.with_options(api_key=key)

    def ask(self, key: str, prompt: Any = "x", **options: Any) -> Any:
        return self.client(key).completions.create(model=MODEL, prompt=prompt, **options)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """The replica leaves what it answers open."""
        before, self.replica.script = self.replica.script, replace(self.replica.script, hold=True)
        self.replica.submits.clear()
        try:
            yield
        finally:
            self.replica.script = before

    def refusal(self, key: str, prompt: Any = "x", **options: Any) -> openai.APIStatusError:
        with pytest.raises(openai.APIStatusError) as refused:
            self.ask(key, prompt, **options)
        return refused.value

    def put(self, *entries: dict[str, Any]) -> None:
        """Swap the Secret, and wait until the router has it: a key that is only in it is valid."""
        mark = f"mark-{self.secret._version}"
        self.secret.swap(keys(*entries, entry("mark", mark)))
        headers = {"Authorization": f"Bearer {mark}"}
        wait_for(
            lambda: self.router.http.get("/v1/models", headers=headers).status_code == 200, "not read again"
        )

    def metric(self, line_start: str) -> float:
        return self.router.metric(line_start)


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, bundle_files: dict[str, bytes], bundle: Bundle
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("keys")
    secret = MountedSecret(folder / "secret")
    secret.swap(keys(entry("probe", "sk-probe")))
    with running_router(
        folder, log_level="info", api_keys_file=str(secret.file), allowed_origins=["https://chat.example"]
    ) as router:
        router.http.headers["Authorization"] = "Bearer sk-probe"
        replica = ScriptedReplica(router, bundle_files, script=Script(tokens=say(bundle, SAID)))
        router.wait_ready()
        with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
            yield Served(router, replica, secret, client)
        replica.stop()


PROBE = entry("probe", "sk-probe")


def test_the_client_of_openai_is_served_with_a_key_and_gets_its_own_error_without(served: Served) -> None:
    served.put(PROBE, entry("alice", "sk-alice"))
    assert served.ask("sk-alice").choices[0].text == SAID
    client = served.client("sk-alice")
    assert [model.id for model in client.models.list()] == [MODEL]
    text = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True
        )
    )
    assert text == SAID
    for wrong in ("sk-alic", "sk-alice2", "none"):
        refused = served.refusal(wrong)
        assert isinstance(refused, openai.AuthenticationError)
        assert (refused.status_code, refused.code, refused.type) == (
            401,
            "invalid_api_key",
            "invalid_request_error",
        )
        assert refused.response.headers["www-authenticate"] == "Bearer"
        assert wrong not in refused.response.text
        assert refused.response.headers["x-request-id"]


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Authorization", "Bearer")],
        [("Authorization", "sk-probe")],
        [("Authorization", "Basic sk-probe")],
        [("Authorization", "Bearer sk-probe"), ("Authorization", "Bearer sk-probe")],
        [("Authorization", "Bearer sk-probe, Bearer sk-probe")],
        [("x-api-key", "sk-probe")],
        [("Authorization", "Bearer \xff\xfe")],
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/tokenize", "/nowhere"])
def test_no_other_field_than_one_bearer_key_opens_a_path(
    served: Served, path: str, headers: list[tuple[str, str]]
) -> None:
    with httpx.Client(base_url=served.router.url) as http:
        sent = [(name.encode(), value.encode("latin-1")) for name, value in headers]
        answer = http.post(path, json={"model": MODEL, "prompt": "x", "user": "probe"}, headers=sent)
        assert answer.status_code == 401
        for open_path in ("/health", "/ready"):
            assert http.get(open_path, headers=sent).status_code == 200


def test_the_scheme_is_read_in_any_case(served: Served) -> None:
    for scheme in ("bearer", "BEARER", "Bearer  "):
        headers = {"Authorization": f"{scheme} sk-probe"}
        assert served.router.http.get("/v1/models", headers=headers).status_code == 200


def test_pages_of_allowed_sites_may_ask_for_permission_and_read_the_refusal(served: Served) -> None:
    origin = {"Origin": "https://chat.example", "Authorization": ""}
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    assert served.router.http.options("/v1/completions", headers={**origin, **asks}).status_code == 200
    refused = served.router.http.get("/v1/models", headers=origin)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://chat.example"


def test_keys_are_replaced_without_a_restart_and_a_bad_file_changes_nothing(served: Served) -> None:
    served.put(PROBE, entry("carol", "sk-old"))
    assert served.ask("sk-old").choices[0].text == SAID
    served.put(PROBE, entry("carol", "sk-old", "sk-new"))
    for key in ("sk-old", "sk-new"):
        assert served.ask(key).choices[0].text == SAID
    served.put(PROBE, entry("carol", "sk-new"))
    assert served.refusal("sk-old").code == "invalid_api_key"
    valid = 'medha_router_file_valid{file="API keys"}'
    for bad in ("keys: [{name: carol, sha256: sk-pasted-by-mistake}]", "{", None):
        served.secret.swap(bad)
        wait_for(lambda: served.metric(valid) == 0, "it should be seen to be wrong")
        assert served.ask("sk-new").choices[0].text == SAID
        served.put(PROBE, entry("carol", "sk-new"))
        assert served.metric(valid) == 1
    log = served.router.log.read_text()
    assert log.count("API keys: the new content cannot be used, so the former stays in force") == 3
    assert "keys.0.sha256.0 has a character" in log
    assert "sk-" not in log, "no key is logged, and nothing that may be one"


def test_a_stream_outlives_its_key(served: Served, bundle: Bundle) -> None:
    served.put(PROBE, entry("dave", "sk-dave"))
    with served.holding():
        stream = served.ask("sk-dave", stream=True)
        text = next(stream).choices[0].text
        assert served.metric('medha_key_requests_open{key="dave"}') == 1
        served.put(PROBE)
        assert served.metric('medha_key_requests_open{key="dave"}') == 1
        served.replica.order("send", Emit(served.replica.submits[0].id, say(bundle, "!"), "length"))
        text += "".join(chunk.choices[0].text for chunk in stream)
    assert text == SAID + "!"
    assert served.refusal("sk-dave").code == "invalid_api_key"
    wait_for(
        lambda: 'key="dave"' not in served.router.metrics_http.get("/metrics").text,
        "series of a key that has gone",
    )


def test_requests_of_a_key_are_limited_and_those_of_another_are_not(served: Served) -> None:
    served.put(PROBE, entry("eve", "sk-eve", requestsPerMinute=2), entry("fay", "sk-fay"))
    for _ in range(2):
        served.ask("sk-eve")
    for refused in (served.refusal("sk-eve"), served.refusal("sk-eve", user="fay")):
        assert isinstance(refused, openai.RateLimitError)
        assert (refused.code, refused.type) == ("rate_limit_exceeded", "rate_limit_error")
        assert "'eve' may send 2 requests a minute (requestsPerMinute)" in refused.message
        assert 1 <= int(refused.response.headers["retry-after"]) <= 30
        assert refused.response.headers["x-medha-limit"] == "requestsPerMinute"
    body = {"model": MODEL, "prompt": "x"}
    headers = {"Authorization": "Bearer sk-eve"}
    assert served.router.post("/tokenize", body, headers=headers).status_code == 429
    assert served.router.http.get("/v1/models", headers=headers).status_code == 200, "it costs nothing"
    served.ask("sk-fay")
    assert served.metric('medha_key_requests_total{key="eve"}') == 2
    assert served.metric('medha_key_refusals_total{key="eve",limit="requestsPerMinute"}') == 3


def test_tokens_of_a_key_are_limited_prompts_and_outputs_together(served: Served, bundle: Bundle) -> None:
    served.put(PROBE, entry("gil", "sk-gil", tokensPerMinute=100))
    output = len(say(bundle, SAID))
    missed = 'medha_request_ttft_attainment_total{met="false"'
    before = served.metric(missed)
    too_long = served.refusal("sk-gil", [5] * 101)
    assert too_long.status_code == 429
    assert "count as 101 tokens, so shorten them" in too_long.message
    assert too_long.response.headers["x-should-retry"] == "false"
    assert "retry-after" not in too_long.response.headers
    served.ask("sk-gil", [5] * 90)
    refused = served.refusal("sk-gil", [5] * 20)
    assert refused.response.headers["x-medha-limit"] == "tokensPerMinute"
    assert int(refused.response.headers["retry-after"]) >= 1
    assert served.metric(missed) == before, "a client's own limit is no failure of the server"
    assert served.metric('medha_key_prompt_tokens_total{key="gil"}') == 90
    assert served.metric('medha_key_output_tokens_total{key="gil"}') == output


@pytest.mark.parametrize(
    ("options", "times"),
    [
        ({"n": 3}, 1),
        ({"echo": True, "logprobs": 0}, 1),
        ({"echo": True, "logprobs": 0, "n": 3}, 2),
        ({"echo": True, "logprobs": 0, "n": 3, "stream": True}, 3),
    ],
)
def test_a_prompt_is_charged_as_often_as_it_is_computed(
    served: Served, bundle: Bundle, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], times: int
) -> None:
    served.put(entry("mona", "k-mona"))
    monkeypatch.setattr(served.replica, "script", Script(say(bundle, SAID), logprobs=True))
    charged = 'medha_key_prompt_tokens_total{key="mona"}'
    before = served.metric(charged)
    served.replica.submits.clear()
    list(served.ask("k-mona", [7] * 10, **options))
    assert served.metric(charged) - before == 10 * times
    assert len({submit.prompt for submit in served.replica.submits}) == times


def test_sequences_that_wait_and_first_tokens_are_counted_of_their_key(served: Served) -> None:
    served.put(PROBE, entry("ida", "sk-ida"), entry("jon", "sk-jon"))

    def waiting(key: str) -> float:
        return served.metric(f'medha_key_sequences_waiting{{key="{key}",service_class="interactive"}}')

    usual = {"waiting_limit": served.replica.card.waiting_limit, "waiting": served.replica.card.waiting}
    served.replica.order("announce", {"waiting_limit": 1, "waiting": 1})
    wait_for(lambda: served.metric("medha_replica_sequences_waiting") == 1, "the replica is not full")
    asking = threading.Thread(target=lambda: served.ask("sk-ida", n=2))
    asking.start()
    wait_for(lambda: waiting("ida") == 2, "they do not wait")
    assert waiting("jon") == 0
    served.replica.order("announce", usual)
    asking.join()
    assert waiting("ida") == 0
    served.ask("sk-jon", extra_headers={"x-slo-ttft-ms": "0.001"})
    assert served.metric('medha_key_ttft_attainment_total{key="ida",met="true"}') == 1
    assert served.metric('medha_key_ttft_attainment_total{key="jon",met="false"}') == 1
    served.put(PROBE)
    wait_for(
        lambda: 'key="ida"' not in served.router.metrics_http.get("/metrics").text,
        "series of a key that has gone",
    )


def test_requests_that_a_key_has_open_are_limited_and_free_when_they_end(
    served: Served, bundle: Bundle
) -> None:
    served.put(PROBE, entry("hal", "sk-hal", concurrency=1))
    with served.holding(), served.ask("sk-hal", stream=True) as stream:
        next(stream)
        refused = served.refusal("sk-hal")
        assert (refused.status_code, refused.response.headers["retry-after"]) == (429, "1")
        assert "may have 1 requests open at the same time (concurrency)" in refused.message
    wait_for(lambda: served.metric('medha_key_requests_open{key="hal"}') == 0, "the client left")
    served.ask("sk-hal")
    for _ in range(2):  # neither do requests that fail stay open
        assert served.refusal("sk-hal", []).status_code == 400
        with pytest.raises(openai.NotFoundError):
            served.client("sk-hal").completions.create(model="other", prompt="x")
        headers = {"Authorization": "Bearer sk-hal"}
        assert (
            served.router.post("/tokenize", {"model": "other", "prompt": "x"}, headers=headers).status_code
            == 404
        )
    served.ask("sk-hal")


def test_a_key_may_be_limited_to_service_classes(served: Served) -> None:
    served.put(
        PROBE, entry("ida", "sk-ida", serviceClasses=["batch"]), entry("jan", "sk-jan", serviceClasses=["no"])
    )

    def used(tier: str | None, **options: Any) -> str:
        raw = served.client("sk-ida").completions.with_raw_response.create(
            model=MODEL, prompt="x", extra_body={"service_tier": tier}, **options
        )
        return str(raw.headers["x-medha-service-class"])

    assert [used(tier) for tier in (None, "auto", "default", "batch")] == ["batch"] * 4
    for key, tier in (("sk-ida", "interactive"), ("sk-jan", None), ("sk-jan", "batch")):
        refused = served.refusal(key, extra_body={"service_tier": tier})
        assert (refused.status_code, refused.code) == (403, "service_class_not_allowed")
        said = "name one of batch in" if key == "sk-ida" else "may use the service classes no only, and"
        assert said in str(refused)
    assert served.refusal("sk-ida", extra_body={"service_tier": "wrong"}).status_code == 400
    for header in ("x-slo-ttft-ms", "x-slo-tpot-ms", "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"):
        refused = served.refusal("sk-ida", extra_headers={header: "1"})
        assert (refused.status_code, refused.code) == (403, "target_not_allowed")


def test_the_log_names_the_key_by_its_name_alone(served: Served) -> None:
    served.put(PROBE, entry("kim", "sk-kim"))
    served.ask("sk-kim", extra_headers={"x-request-id": "asked-by-kim"}, user="somebody-else")
    served.refusal("sk-wrong", extra_headers={"x-request-id": "asked-by-nobody"})

    def line(request_id: str) -> str:
        return next(
            (one for one in served.router.log.read_text().splitlines() if f" id={request_id} " in one), ""
        )

    wait_for(lambda: bool(line("asked-by-kim") and line("asked-by-nobody")), "nothing was logged")
    assert f" 200 id=asked-by-kim key=kim model={MODEL} outcome=length " in line("asked-by-kim")
    assert " 401 id=asked-by-nobody outcome=invalid_api_key " in line("asked-by-nobody")
    assert "sk-" not in served.router.log.read_text()
    assert "somebody-else" not in served.router.log.read_text()


def test_two_keys_share_kv_only_if_their_group_says_so(served: Served) -> None:
    served.put(
        PROBE, entry("lea", "sk-lea", "sk-lea-2"), entry("max", "sk-max"),
        entry("ned", "sk-ned", cacheGroup="team"), entry("ola", "sk-ola", cacheGroup="team"),
        entry("team", "sk-team"),
    )  # fmt: skip

    def salt(key: str, wanted: str | None = None) -> str:
        served.replica.submits.clear()
        served.ask(key, extra_body={"cache_salt": wanted})
        return served.replica.salts[served.replica.submits[0].prompt]

    assert salt("sk-lea") == salt("sk-lea-2"), "a new key of one client finds its cache"
    assert salt("sk-ned") == salt("sk-ola")
    one_each = [
        salt(key, wanted) for key in ("sk-lea", "sk-max", "sk-ned", "sk-team") for wanted in (None, "mine")
    ]
    assert len(set(one_each)) == 8
    assert salt("sk-max", "key:lea\n") != salt("sk-lea"), "no salt of a client's is another key's"


def test_places_are_shared_between_keys_whoever_sends_their_requests(served: Served) -> None:
    """A key owns all of its requests; several values of one key are one owner."""
    served.replica.submits.clear()
    for key in ("sk-lea", "sk-lea-2", "sk-lea", "sk-max"):
        served.ask(key, user="somebody", extra_headers={"x-request-id": "one"})
    owners = [submit.owner for submit in served.replica.submits]
    assert owners == ["key:lea"] * 3 + ["key:max"]


@pytest.mark.parametrize(
    ("content", "named"),
    [(None, "No such file"), ("keys: [{name: a, sha256: sk-x}]", "keys.0.sha256.0 has a character")],
)
def test_a_router_does_not_start_open_when_its_keys_cannot_be_used(
    tmp_path: Path, content: str | None, named: str
) -> None:
    links = KeyFiles.create(tmp_path / "links")
    file = tmp_path / "keys.yaml"
    if content is not None:
        file.write_text(content)
    RouterSettings(
        port=0, key_file=links.router, enrolment_file=links.enrolment, api_keys_file=file
    ).write(tmp_path / "settings.json")  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-m", "medha_router", "--settings", str(tmp_path / "settings.json")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 1
    assert str(file) in ended.stderr
    assert named in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "sk-x" not in ended.stderr


def test_a_changed_file_is_read_beside_the_event_loop(tmp_path: Path) -> None:
    async def readers() -> list[int]:
        path = tmp_path / "keys.yaml"
        found: list[int] = []
        watched = WatchedFiles("API keys", (path,), lambda: found.append(threading.get_ident()))
        changed = asyncio.Event()
        path.touch()
        watching = asyncio.create_task(watched.watch(changed.set, 0.0))
        await asyncio.wait_for(changed.wait(), 10)
        watching.cancel()
        return found

    at_start, later = asyncio.run(readers())
    assert at_start == threading.get_ident() != later
