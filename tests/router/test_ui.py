"""The page `/ui` and its data: who gets them, what they hold, and what a real browser makes of them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from browser import Browser, browser, needs_browser
from medha.observing.timeline import Began, Computed, Finished, Happening, Placed, Sampled, Timeline
from medha.wire.messages import ChunkProgress, ProgressReport
from medha_router.ui import MOST_WATCHERS
from router.conftest import (
    MODEL,
    Router,
    Script,
    ScriptedReplica,
    running_router,
    wait_for,
)

SECRET = "a prompt that nobody else should read"


def chat(router: Router, prompt: str = SECRET, **fields: Any) -> str:
    """Send a request; return its id."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, **fields}
    answer = router.post("/v1/completions", body)
    assert answer.status_code == 200
    return str(answer.json()["id"])


def bar_of(router: Router, request_id: str) -> dict[str, Any]:
    bars = router.metrics_http.get("/ui/state").json()["bars"]
    (found,) = [bar for bar in bars if bar["id"].startswith(request_id)]
    return dict(found)


def test_the_state_has_the_bar_of_a_request_and_nothing_that_it_said(router: Router) -> None:
    request_id = chat(router)
    text = router.metrics_http.get("/ui/state").text
    bar = bar_of(router, request_id)
    assert (bar["outcome"], bar["class"], bar["model"], bar["replica"]) == (
        "length",
        "interactive",
        MODEL,
        "r0",
    )
    assert bar["arrived"] <= bar["first"] <= bar["ended"]
    assert bar["due"] > bar["arrived"]
    assert SECRET not in text
    assert "quick brown" not in text
    (card,) = json.loads(text)["replicas"]
    assert (card["name"], card["state"], card["kv_free"]) == ("r0", "ready", 75_000)


def test_replicas_report_chunks_while_a_page_is_open(router: Router, replica: ScriptedReplica) -> None:
    replica.order("announce", {"reports_progress": True})
    replica.script = Script(tokens=(5, 6), hold=True)
    with httpx.stream("GET", f"{router.metrics_http.base_url}/ui/events", timeout=30) as events:
        lines = events.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        assert first["whole"]
        body = {"model": MODEL, "prompt": "x", "max_tokens": 8, "stream": True}
        with router.http.stream("POST", "/v1/completions", json=body):
            wait_for(lambda: len(replica.watches) > 0, "the router does not ask for progress")
            wait_for(lambda: len(replica.submits) == 1, "nothing was submitted")
            (submit,) = replica.submits
            report = ProgressReport((ChunkProgress(submit.id, 3, 0, is_first=True),), 0.01)
            replica.order("send", report)
            wait_for(lambda: "chunk" in kinds(bar_of(router, submit.id)), "the report is not in the bar")
        for line in lines:  # it comes with the next update
            if line and "chunk" in line:
                break
    replica.order("announce", {"reports_progress": False})


def kinds(bar: dict[str, Any]) -> list[str]:
    return [segment[0] for segment in bar["segments"]]


def test_the_page_loads_nothing_from_elsewhere_and_only_this_port_has_it(router: Router) -> None:
    page = router.metrics_http.get("/ui")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("default-src 'self';")
    assert "unsafe" not in page.headers["content-security-policy"]
    assert router.http.get("/ui").status_code == 404
    assert router.metrics_http.get("/ui/../process.py").status_code == 404
    assert router.metrics_http.get("/ui/nothing.js").status_code == 404
    assert router.metrics_http.post("/ui/state").status_code == 405


@pytest.mark.parametrize("path", ["/ui", "/ui/page.css", "/ui/state", "/ui/events"])
def test_a_page_of_another_name_is_refused(router: Router, path: str) -> None:
    answer = router.metrics_http.get(path, headers={"Host": "elsewhere.example"})
    assert answer.status_code == 403


def test_clients_on_other_machines_are_refused_and_open_pages_do_not_hold_up_the_end(tmp_path: Path) -> None:
    """Its port may be open to scrapers on any address, and a name of this machine in Host proves nothing."""
    with ExitStack() as stack:
        open_router = stack.enter_context(running_router(tmp_path, metrics_host="0.0.0.0"))
        port = open_router.metrics_http.base_url.port
        addresses = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout
        other = next((one for one in addresses.split() if "." in one), None)
        if other is None:
            pytest.skip("this machine has no address but loopback")
        headers = {"Host": "localhost"}
        assert httpx.get(f"http://{other}:{port}/metrics", headers=headers).status_code == 200
        assert httpx.get(f"http://{other}:{port}/ui/state", headers=headers).status_code == 403
        local = f"http://127.0.0.1:{port}/ui"
        assert httpx.get(f"{local}/state").status_code == 200
        headers = {"Host": "elsewhere.example"}  # a page's own name may resolve to this machine
        assert httpx.get(f"{local}/state", headers=headers).status_code == 403
        with httpx.stream("GET", f"{local}/events", timeout=30) as events:
            lines = events.iter_lines()
            assert next(lines)
            stack.close()
            list(lines)  # the stream has an end
        assert "Cancel" not in open_router.log.read_text()


def test_head_has_the_headers_of_get_and_opens_no_stream(router: Router) -> None:
    for path in ("/ui", "/ui/state", "/ui/events"):
        url = f"{router.metrics_http.base_url}{path}"
        with httpx.stream("GET", url, timeout=30) as got:
            pass
        for _ in range(MOST_WATCHERS + 1):  # one that stayed open would use up a place
            head = router.metrics_http.head(path)
            assert (head.status_code, head.content) == (200, b"")
        framing = {"content-length", "transfer-encoding"}
        assert head.headers.keys() - framing == got.headers.keys() - framing
        assert head.headers["content-type"] == got.headers["content-type"]


def test_a_page_too_many_is_refused_and_one_that_closes_makes_room(router: Router) -> None:
    url = f"{router.metrics_http.base_url}/ui/events"
    with httpx.Client(timeout=30) as client:
        streams = [client.send(client.build_request("GET", url), stream=True) for _ in range(MOST_WATCHERS)]
        assert {stream.status_code for stream in streams} == {200}
        refused = client.get(url)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        for stream in streams:
            stream.close()

    def opens() -> bool:
        with httpx.stream("GET", url, timeout=30) as stream:
            return stream.status_code == 200

    wait_for(opens, "the closed pages still count")


# --- in a browser ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture
def page(chromium: Browser, router: Router) -> Iterator[Browser]:
    """The page, opened, in light and wide; it must end without a problem."""
    chromium.problems.clear()
    chromium.show(1600, 1000)
    chromium.open(f"{router.metrics_http.base_url}/ui")
    chromium.until("document.getElementById('status').dataset.state === 'live'")
    yield chromium
    assert chromium.problems == []


def text_of(page: Browser, selector: str) -> str:
    return str(page.evaluate(f"document.querySelector({selector!r}).innerText"))


@needs_browser
def test_a_request_becomes_a_bar_that_the_keys_and_the_table_reach(page: Browser, router: Router) -> None:
    request_id = chat(router)
    page.evaluate("document.getElementById('scroll').focus()")

    def spoken() -> str:
        """Leaves the bars, reaches the last one, and returns what the page says of it."""
        page.press("Escape")
        page.press("End")
        return text_of(page, "#spoken")

    wait_for(lambda: request_id in spoken(), "the last bar is another one")
    # The answer is complete before the page's next event says so.
    wait_for(lambda: "ended at its token limit" in spoken(), "the bar has no end")
    page.press("Escape")
    assert text_of(page, "#spoken") == ""
    page.press("t")
    page.until(f"document.getElementById('requests').innerText.includes({request_id!r})")
    assert page.evaluate("document.getElementById('as-table').getAttribute('aria-pressed')") == "true"
    page.press("t")
    assert "interactive" in text_of(page, "#classes")
    assert "r0" in text_of(page, "#replicas")
    assert page.evaluate("document.querySelector('[role=meter]').getAttribute('aria-valuenow')") == "25"


PAINTED = """(() => {
  const canvas = document.getElementById('canvas');
  const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  const colors = new Set();
  for (let i = 0; i < data.length; i += 4) colors.add(`${data[i]},${data[i + 1]},${data[i + 2]}`);
  const probe = document.createElement('i');
  document.body.append(probe);
  const found = {};
  for (const name of ['chunk', 'decode', 'waiting']) {
    probe.style.color = `var(--${name})`;
    found[name] = colors.has(getComputedStyle(probe).color.replace(/[^0-9,]/g, ''));
  }
  probe.remove();
  return found;
})()"""


@needs_browser
def test_the_page_fits_and_can_be_read_at_every_width_and_in_light_and_dark(
    page: Browser, router: Router
) -> None:
    chat(router)
    for width in (400, 800, 1600):
        for dark in (False, True):
            page.show(width, 900, dark=dark)
            page.until(f"innerWidth === {width}")
            assert page.evaluate("document.documentElement.scrollWidth") == width
            assert page.evaluate(CONTRAST) == [], (width, dark)
            assert page.evaluate(NAMES) == [], (width, dark)


@needs_browser
def test_durations_are_rounded_before_they_are_divided_into_minutes_and_hours(page: Browser) -> None:
    durations = {0.0994: "99 ms", 9.949: "9.95 s", 119.0: "119.0 s", 179.7: "3 min 0 s", 3599.6: "1 h 0 min", 8837.0: "2 h 27 min"}  # fmt: skip
    asked = f"import('/ui/words.js').then(({{ seconds }}) => {list(durations)}.map(seconds))"
    assert page.evaluate(asked) == list(durations.values())


CONTRAST = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (text) => rgb(text).slice(0, 3).map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (one) => {
    for (; one; one = one.parentElement) {
      const color = getComputedStyle(one).backgroundColor;
      if ((rgb(color)[3] ?? 1) > 0) return color;
    }
    return 'rgb(255, 255, 255)';
  };
  const bad = [];
  for (const one of document.querySelectorAll('body *')) {
    const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !one.checkVisibility() || one.closest('.sr, .skip') || one.matches(':disabled')) continue;
    const [a, b] = [light(getComputedStyle(one).color), light(ground(one))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) bad.push(`${one.tagName} ${one.textContent.slice(0, 30)}`);
  }
  return bad;
})()"""
"""Elements whose text contrasts with its background by less than 4.5 (WCAG 2.2, 1.4.3)."""

NAMES = """(() => {
  const ids = [...document.querySelectorAll('[id]')].map((one) => one.id);
  const bad = ids.filter((id, index) => ids.indexOf(id) !== index).map((id) => `twice: ${id}`);
  for (const one of document.querySelectorAll('button, input, select, a, summary, [tabindex], [role=meter], [role=group], [role=region]')) {
    const by = (one.getAttribute('aria-labelledby') ?? '').split(' ').filter(Boolean);
    bad.push(...by.filter((id) => !document.getElementById(id)).map((id) => `no ${id}`));
    const named = one.getAttribute('aria-label') || by.length || one.labels?.length || one.textContent.trim();
    if (!named || (one.matches('[tabindex="0"]') && !one.getAttribute('role'))) bad.push(one.outerHTML.slice(0, 80));
  }
  for (const one of document.querySelectorAll('th')) if (!one.scope) bad.push(`scope: ${one.textContent}`);
  return bad;
})()"""
"""Controls and regions without a name, and what refers to nothing."""


def log_of(happenings: list[tuple[float, Happening]], path: Path) -> Path:
    """Write a record with the bars of these happenings, as a controller records it from 1000 s on."""
    timeline, lines, since = Timeline(1000.0), [], 0
    for at, happening in happenings:
        timeline.take(happening, at)
        bars = timeline.changes(since)
        since = timeline.change
        lines.append({"now": at, "event": {}, "commands": "", "bars": bars})
    head = [
        {"spec": {"model": {"name": "recorded"}}, "origin": 1000.0},
        {"v": 1, "type": "RankReady", "body": {}},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*head, *lines]))
    return path


def convoy() -> list[tuple[float, Happening]]:
    """A long prompt of 40 chunks, and a short request between every two of them."""
    found: list[tuple[float, Happening]] = [
        (1000.0, Began("long", 20_000, "batch", due_seconds=60.0)),
        (1000.0, Placed("long", "r0")),
    ]
    for number in range(40):
        at = number + 1001.0
        found.append((at, Computed("long", at - 0.6, 500, 0, number == 0)))
        name = f"short-{number}"
        found += [
            (at, Began(name, 100, "chat", due_seconds=1.0, tpot_target_seconds=0.1)),
            (at, Placed(name, "r0")),
            (at + 0.3, Computed(name, at + 0.1, 100, 0, True)),
            (at + 0.3, Sampled(name, 1)),
            (at + 0.38, Sampled(name, 1)),
            (at + 0.38, Finished(name, "stop")),
        ]
    return [*found, (1041.0, Sampled("long", 1)), (1041.0, Finished("long", "stop"))]


@needs_browser
def test_a_log_replays_and_shows_that_short_requests_pass_a_long_one(page: Browser, tmp_path: Path) -> None:
    page.choose_file("#file", log_of(convoy(), tmp_path / "log.jsonl"))
    page.until("document.getElementById('status').innerText.includes('Replay of log.jsonl')")
    page.evaluate("document.getElementById('scroll').focus()")
    page.press("Space")
    assert text_of(page, "#play-text") == "Play"
    seek(page, 30.5)
    assert text_of(page, "#convoy") == (
        "While a long prompt waited for its first token, 30 short requests got theirs: 30 of 30 in time, "
        "the slowest after 0.30 s."
    )
    assert page.evaluate(PAINTED) == {"chunk": True, "decode": True, "waiting": True}
    page.press("Home")
    page.until("document.getElementById('spoken').textContent.includes('31 chunks, 30 interruptions')")
    before = float(page.evaluate("document.getElementById('scrub').value"))
    page.press(".")
    page.until(f"Number(document.getElementById('scrub').value) > {before}")
    figures = page.evaluate(
        "[...document.querySelectorAll('#figures dd:nth-of-type(1)')].map((one) => one.innerText)"
    )
    assert figures[:4] == ["100 %", "0.30 s", "100 %", "80 ms"]
    page.press("Space")  # plays on
    page.until("Number(document.getElementById('scrub').value) > 34.2")
    page.press("l")
    page.until("document.getElementById('status').dataset.state === 'live'")


@needs_browser
def test_the_slider_has_the_range_of_a_log_before_the_next_frame(page: Browser, tmp_path: Path) -> None:
    page.evaluate("window.requestAnimationFrame = () => 0")
    page.choose_file("#file", log_of(convoy(), tmp_path / "log.jsonl"))
    page.until("document.getElementById('status').innerText.includes('Replay of log.jsonl')")
    low, high = page.evaluate("[Number(scrub.min), Number(scrub.max)]")
    assert (low, high) == (0, 41), "the range of the record, not that of the router"


def seek(page: Browser, seconds: float) -> None:
    page.evaluate(
        f"(() => {{ const scrub = document.getElementById('scrub'); scrub.value = Number(scrub.min) + {seconds};"
        " scrub.dispatchEvent(new Event('input')); })()"
    )
    page.until(f"document.getElementById('clock').textContent.startsWith('{seconds}')")


@needs_browser
@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('[\n{"ph":"M"}', "is a trace"),
        ("hello", "its first line holds no spec"),
        ('{"spec":{}}\n{}\n{"now":1,"event":{}}\n', "an earlier release"),
        ('{"spec":{}}\n{}\n{"now":\n{"now":1}\n', "line 3 is not JSON"),
    ],
)
def test_a_file_that_is_no_log_is_refused_by_name(
    page: Browser, tmp_path: Path, content: str, named: str
) -> None:
    (tmp_path / "file.jsonl").write_text(content)
    page.choose_file("#file", tmp_path / "file.jsonl")
    page.until("!document.getElementById('notice').hidden")
    assert named in text_of(page, "#notice-text")
    assert "file.jsonl" in text_of(page, "#notice-text")
    assert page.evaluate("document.getElementById('status').dataset.state") == "live"


@needs_browser
def test_a_page_with_5_000_bars_answers(page: Browser, tmp_path: Path) -> None:
    happenings: list[tuple[float, Happening]] = []
    for number in range(5000):
        at, name = number * 0.01, f"r{number}"
        happenings += [
            (at, Began(name, 100, "chat", due_seconds=1.0)),
            (at + 0.2, Sampled(name, 1)),
            (at + 0.4, Sampled(name, 1)),
            (at + 2.0, Finished(name, "stop")),
        ]
    timeline = Timeline(0.0, most_bars=6000)
    for at, happening in sorted(happenings, key=lambda one: one[0]):
        timeline.take(happening, at)
    lines = [{"spec": {}, "origin": 0.0}, {}, {"now": 52.0, "bars": timeline.changes()}]
    log = tmp_path / "many.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page.choose_file("#file", log)
    page.until("document.getElementById('status').dataset.state === 'replay'")
    page.evaluate(
        "document.getElementById('window').value = '60', document.getElementById('window').onchange()"
    )
    page.evaluate("document.getElementById('play').click()")  # pauses
    seek(page, 51.5)
    assert "5,000 of 5,000" in text_of(page, "#figures")
    assert page.evaluate(PAINTED)["decode"]


@needs_browser
def test_the_page_forgets_open_bars_that_were_dropped_and_keeps_those_that_ended(page: Browser) -> None:
    timeline = Timeline(0.0, most_bars=2)
    timeline.take(Began("open", 1, "default"), 0.0)
    timeline.take(Began("ended", 1, "default"), 1.0)
    timeline.take(Finished("ended", "stop"), 2.0)
    first, since = timeline.changes(), timeline.change
    timeline.take(Began("b", 1, "default"), 3.0)
    timeline.take(Began("c", 1, "default"), 4.0)
    shown = page.evaluate(
        "import('/ui/bars.js').then(({ Bars, Rows }) => { const bars = new Bars(); const rows = new Rows();"
        f"for (const change of {json.dumps(first)}) bars.apply(change); rows.place(bars.list, 0);"
        f"for (const change of {json.dumps(timeline.changes(since))}) bars.apply(change); rows.place(bars.list, 0);"
        "return bars.list.map((bar) => [bar.id, rows.rowOf(bar)]); })"
    )
    assert shown == [["ended", 1], ["b", 0], ["c", 1]]


@needs_browser
def test_a_page_whose_router_has_gone_says_so(
    chromium: Browser, tmp_path: Path, bundle_files: dict[str, bytes]
) -> None:
    with running_router(tmp_path) as other:
        chromium.show(1600, 1000, calm=True)
        chromium.open(f"{other.metrics_http.base_url}/ui")
        chromium.until("document.getElementById('status').dataset.state === 'live'")
        chromium.until("document.getElementById('empty').innerText.includes('No replica is ready yet')")
    chromium.until("document.getElementById('status').innerText.includes('trying again')")
    assert chromium.evaluate("document.body.dataset.stale") == "true"
