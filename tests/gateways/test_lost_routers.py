"""Routers behind Envoy that are killed or replaced: who gets an error, and what is computed twice."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace

import openai

from gateways.conftest import SAID, Site
from router.conftest import MODEL, Script, wait_for


def ask(client: openai.OpenAI, **options: object) -> str:
    return str(client.completions.create(model=MODEL, prompt="x", **options).choices[0].text)  # type: ignore[call-overload]


def answer_or_error(client: openai.OpenAI) -> str:
    """Return the answer's text, or all that is known about the error."""
    try:
        return ask(client)
    except openai.APIStatusError as error:
        return f"{error.status_code} {dict(error.response.headers)} {error.response.text!r}"
    except openai.APIError as error:
        return repr(error)


def test_a_router_that_is_replaced_refuses_no_request(plain_site: Site) -> None:
    site = plain_site
    leaving, staying = site.routers
    stop = threading.Event()
    answers: list[str] = []

    def load() -> None:
        with site.client() as client:
            while not stop.is_set():
                answers.append(answer_or_error(client))

    clients = [threading.Thread(target=load) for _ in range(3)]
    for client in clients:
        client.start()
    wait_for(lambda: all(replica.submits for replica in site.replicas.values()), "not both routers are used")
    site.routers[leaving].process.send_signal(signal.SIGTERM)
    site.envoy.wait(lambda: site.envoy.healthy() == {staying}, "Envoy never saw it leave")
    assert site.routers[leaving].process.poll() is None, "it ended before Envoy knew"
    site.routers[leaving].process.wait(60)
    after = len(answers)
    wait_for(lambda: len(answers) > after + 3, "nobody is served any more")
    stop.set()
    for client in clients:
        client.join()
    assert set(answers) == {SAID}


def test_a_router_that_is_killed_breaks_its_own_requests_once_and_no_later_ones(
    plain_site: Site, script: Script
) -> None:
    site = plain_site
    site.say(replace(script, hold=True))
    raised: list[BaseException] = []

    def wait_for_answer() -> None:
        with site.client() as client:
            try:
                # A client may not turn Envoy's retries on, either.
                ask(client, extra_headers={"x-envoy-retry-on": "5xx,reset", "x-envoy-max-retries": "3"})
            except openai.APIError as error:
                raised.append(error)

    waiting = threading.Thread(target=wait_for_answer)
    waiting.start()
    replica, _ = site.the_submit()
    replica.router.process.kill()
    waiting.join()
    (error,) = raised
    assert isinstance(error, openai.InternalServerError)
    assert error.status_code == 503
    assert len(site.submitted()) == 1, "it was computed twice"
    site.say(script)
    with site.client() as client:
        assert {answer_or_error(client) for _ in range(10)} == {SAID}
