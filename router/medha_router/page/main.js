// The page: where data come from (the router, or a record), which time is shown, and what the keys do.

import { Bars, Rows, endedAt, figuresAt, passing, quantile } from "./bars.js";
import { barAt, boxOf, draw, layout, shortRowHeight } from "./draw.js";
import { NotARecord, readRecord, replicasAt } from "./recording.js";
import { NONE, cellsOf, count, percent, plural, seconds, sentenceOf, share } from "./words.js";

const BEHIND_SECONDS = 0.6; // what is shown lags behind the router by an update, so that it moves evenly
const PANELS_MS = 500;
const FRAME_MS = 40;
const RETRY_MS = 3000;
const MOST_LOADS = 7200;
const MOST_FILE_BYTES = 400e6;
const TABLE_ROWS = 100;

const $ = (id) => document.getElementById(id);
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const dark = matchMedia("(prefers-color-scheme: dark)");
const context = $("canvas").getContext("2d");

const live = { bars: new Bars(), rows: new Rows(), loads: [], waiting: {}, now: 0, wall: 0, receivedAt: 0, state: "loading", ready: false };
let source = live; // or a recording
let selected = null;
let t = 0;
let playing = true;
let shortHeight = 0;
let needsDraw = true;
let drawnAt = 0;
let panelsAt = 0;
let colors = readColors();
let view = null;

// --- the router --------------------------------------------------------------------------------

function connect() {
  const events = new EventSource("/ui/events");
  events.onmessage = (message) => receive(JSON.parse(message.data));
  events.onerror = () => {
    if (live.state !== "loading" || events.readyState === EventSource.CLOSED) setState("lost");
    if (events.readyState === EventSource.CLOSED) setTimeout(connect, RETRY_MS);
  };
}

function receive(data) {
  if (data.whole) {
    live.bars = new Bars();
    live.rows = new Rows();
    live.loads = [];
    if (source === live) {
      selected = null;
      shortHeight = 0;
    }
  }
  for (const change of data.bars) live.bars.apply(change);
  const hasDropped = data.bars.some((change) => change.dropped);
  const before = live.bars.list.length;
  live.bars.trim();
  if (source === live && selected && live.bars.byNumber.get(selected.number) !== selected) select(null, false);
  if (hasDropped || live.bars.list.length < before) live.rows.placed = new Map([...live.rows.placed].filter(([bar]) => live.bars.byNumber.get(bar.number) === bar));
  live.now = data.now;
  live.wall = data.wall - data.now;
  live.waiting = data.waiting;
  live.ready = data.ready;
  live.receivedAt = performance.now();
  live.loads.push({ at: data.now, replicas: data.replicas });
  if (live.loads.length > MOST_LOADS) live.loads.shift();
  setState("live");
}

function setState(state) {
  if (live.state === state) return;
  live.state = state;
  needsDraw = true;
  showStatus();
}

function liveNow() {
  const since = (performance.now() - live.receivedAt) / 1000;
  return Math.max(0, live.now + Math.min(since, 2) - BEHIND_SECONDS);
}

function showStatus() {
  const shown = source === live ? live.state : "replay";
  const paused = source === live && !playing;
  const words = { loading: "Connecting", live: paused ? "Paused" : "Live", lost: "Connection lost, trying again", replay: `Replay of ${source.name ?? ""}` };
  $("status").dataset.state = paused && shown === "live" ? "paused" : shown;
  setText($("status-text"), words[shown]);
  document.body.dataset.stale = String(shown === "lost");
  $("speed-field").hidden = source === live;
  $("live").disabled = source === live && playing;
  setText($("play-text"), playing ? "Pause" : "Play");
  $("play-shape").setAttribute("d", playing ? "M3.5 2.5h3v11h-3zM9.5 2.5h3v11h-3z" : "M4 2.5v11l9-5.5z");
  showRange(); // at once: the next frame may be late, and the slider must not keep the range of another source
}

// --- time ----------------------------------------------------------------------------------------

function range() {
  if (source === live) {
    const now = liveNow();
    return { from: Math.min(live.bars.list.length ? live.bars.firstAt : now, now), to: now };
  }
  return { from: source.began, to: source.ended };
}

function windowSeconds() {
  return Number($("window").value);
}

function seek(to) {
  const { from, to: last } = range();
  t = Math.min(Math.max(to, from), last);
  if (source === live && playing) playing = false;
  needsDraw = true;
  showStatus();
}

function togglePlay() {
  playing = !playing;
  if (playing && source !== live && t >= source.ended) t = source.began;
  needsDraw = true;
  showStatus();
}

function goLive() {
  if (source !== live) {
    source = live;
    selected = null;
    shortHeight = 0;
  }
  playing = true;
  closeNotice();
  needsDraw = true;
  showStatus();
}

function replay(recording) {
  source = { ...recording, rows: new Rows() };
  selected = null;
  shortHeight = 0;
  t = source.began;
  playing = true;
  const length = source.ended - source.began;
  const fitting = [...$("window").options].find((option) => Number(option.value) >= Math.min(length, 180));
  $("window").value = fitting ? fitting.value : "180";
  closeNotice();
  needsDraw = true;
  showStatus();
}

async function openFile(file) {
  if (!file) return;
  try {
    if (file.size > MOST_FILE_BYTES) throw new NotARecord(`${file.name} has ${count(Math.round(file.size / 1e6))} MB; this page reads at most 400 MB. Record a shorter time.`);
    replay(readRecord(await file.text(), file.name));
  } catch (error) {
    notice(error instanceof NotARecord ? error.message : `${file.name} cannot be read: ${error.message}`);
  }
}

function timeWords(at) {
  if (source !== live) return `${(at - source.began).toFixed(windowSeconds() < 20 ? 1 : 0)} s`;
  return new Date((live.wall + at) * 1000).toLocaleTimeString("en-GB");
}

// --- drawing --------------------------------------------------------------------------------------

function readColors() {
  const style = getComputedStyle(document.documentElement);
  const found = {};
  for (const name of ["surface", "text", "muted", "line", "grid", "waiting", "chunk", "decode", "aside", "late", "selected"]) {
    found[name] = style.getPropertyValue(`--${name}`).trim();
  }
  return found;
}

function frame(at) {
  requestAnimationFrame(frame);
  const elapsed = at - drawnAt;
  const moves = playing && (source !== live || live.state === "live");
  if (!needsDraw && !(moves && elapsed >= (calm.matches ? PANELS_MS : FRAME_MS))) return;
  if (playing) {
    if (source === live) t = liveNow();
    else {
      t = Math.min(source.ended, t + (Math.min(elapsed, 1000) / 1000) * Number($("speed").value));
      if (t >= source.ended) {
        playing = false;
        showStatus();
      }
    }
  }
  drawnAt = at;
  drawTimeline();
  if (needsDraw || at - panelsAt >= PANELS_MS) {
    panelsAt = at;
    showPanels();
  }
  needsDraw = false;
}

function drawTimeline() {
  const scroll = $("scroll");
  const window = windowSeconds();
  const bars = source.bars.list;
  source.rows.place(bars, window * 0.004);
  const used = source.rows.used(bars, t, window);
  // Rows only become lower, so that nothing jumps while it is watched.
  const wanted = shortRowHeight(used.short);
  if (!shortHeight || wanted < shortHeight) shortHeight = wanted;
  const places = layout(used, shortHeight);
  const width = scroll.clientWidth;
  const height = scroll.clientHeight;
  const ratio = devicePixelRatio || 1;
  const canvas = $("canvas");
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const spacer = Math.max(0, Math.ceil(places.height - height));
  if ($("spacer").offsetHeight !== spacer) $("spacer").style.height = `${spacer}px`;
  const offset = source === live ? live.wall - new Date().getTimezoneOffset() * 60 : -source.began;
  view = {
    width, height, t, to: source === live ? t : Math.max(t, source.began + window), window, bars, places, selected,
    rows: source.rows,
    scrollTop: scroll.scrollTop,
    label: timeWords,
    labelOffset: offset,
    font: `12px ${getComputedStyle(document.documentElement).fontFamily}`,
  };
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  draw(context, view, colors);
}

// --- panels ----------------------------------------------------------------------------------------

const FIGURES = ["TTFT in time", "TTFT", "TPOT in time", "TPOT", "Waiting", "Running", "Prefill ahead", "KV used"];

function makeFigures() {
  for (const name of FIGURES) {
    const cell = document.createElement("div");
    for (const [tag, text] of [["dt", name], ["dd", NONE], ["dd", "\u00a0"]]) {
      const element = document.createElement(tag);
      element.textContent = text;
      cell.append(element);
    }
    cell.lastChild.className = "more";
    $("figures").append(cell);
  }
}

function showPanels() {
  const window = windowSeconds();
  const bars = source.bars.list;
  const { all, classes } = figuresAt(bars, t, window);
  const replicas = replicasAt(source.loads, t);
  const isFollowing = source === live && playing;
  const waitingOf = (name, figures) => (isFollowing ? (live.waiting[name] ?? 0) : figures.waiting);
  const waiting = isFollowing ? Object.values(live.waiting).reduce((sum, one) => sum + one, 0) : all.waiting;
  showFigures(all, waiting, replicas);
  showClasses(classes, waitingOf, replicas);
  showReplicas(replicas);
  showConvoy(bars, window);
  showEmpty(bars, window);
  if (!$("table-view").hidden) showTable(bars, window);
  if (selected) showDetails();
  showRange();
  const words = source === live ? timeWords(t) : `${(t - source.began).toFixed(1)} of ${(source.ended - source.began).toFixed(1)} s`;
  setText($("clock"), words);
  $("scrub").setAttribute("aria-valuetext", words);
  const models = [...new Set(replicas.map((one) => one.model))].join(", ") || source.model || "";
  const where = replicas.length ? plural(replicas.length, "replica", "replicas") : source === live ? "no replica yet" : "";
  setText($("source"), live.state === "loading" && source === live ? "Loading" : [models, where].filter(Boolean).join(", "));
  setText($("classes-note"), `Requests of the last ${$("window").selectedOptions[0].text}`);
}

function showRange() {
  const { from, to } = range();
  const scrub = $("scrub");
  scrub.min = String(from);
  scrub.max = String(Math.max(to, from + 0.05));
  if (Math.abs(Number(scrub.value) - t) > 0.04) scrub.value = String(t);
}

function showFigures(all, waiting, replicas) {
  const pending = replicas.reduce((sum, one) => sum + one.pending, 0);
  const total = replicas.reduce((sum, one) => sum + one.kv_total, 0);
  const free = replicas.reduce((sum, one) => sum + one.kv_free, 0);
  const targets = [...all.tpotTargets].sort((a, b) => a - b);
  const p99Share = quantile(all.ttftShare, 0.99);
  const values = [
    [share(all.ttftMet, all.ttftKnown), `${count(all.ttftMet)} of ${count(all.ttftKnown)}`, all.ttftMet < all.ttftKnown],
    [seconds(quantile(all.ttft, 0.5)), `p50; p99 ${seconds(quantile(all.ttft, 0.99))}, ${percent(p99Share)} of target`],
    [share(all.tpotMet, all.tpotKnown), `${count(all.tpotMet)} of ${count(all.tpotKnown)} that ended`, all.tpotMet < all.tpotKnown],
    [seconds(quantile(all.tpot, 0.5)), `p50; p99 ${seconds(quantile(all.tpot, 0.99))}, target ${targets.length ? seconds(targets[0]) : NONE}`],
    [count(waiting), `in the router; ${count(all.placed)} at a replica`],
    [count(all.prefill + all.decode), `${count(all.prefill)} in prefill, ${count(all.decode)} in decode`],
    [replicas.length ? seconds(pending) : NONE, "predicted, of all replicas"],
    [total ? percent(1 - free / total) : NONE, total ? `of ${count(total)} tokens` : "no replica"],
  ];
  [...$("figures").children].forEach((cell, index) => {
    const [value, more, isBad] = values[index];
    setText(cell.children[1], value);
    setText(cell.children[2], more);
    cell.children[1].classList.toggle("bad", Boolean(isBad));
  });
}

function showClasses(classes, waitingOf, replicas) {
  const names = new Set(replicas.flatMap((one) => one.classes.map((terms) => terms.name)));
  for (const name of classes.keys()) names.add(name);
  const rows = [...names].map((name) => {
    const one = classes.get(name);
    const targets = replicas.flatMap((replica) => replica.classes.filter((terms) => terms.name === name).map((terms) => terms.tpot));
    const target = targets.length ? Math.min(...targets) : null;
    if (!one) return [name, count(waitingOf(name, { waiting: 0 })), "0", "0", "0", NONE, NONE, NONE, NONE, NONE, NONE, NONE, seconds(target)];
    return [
      name, count(waitingOf(name, one)), count(one.placed), count(one.prefill), count(one.decode),
      share(one.ttftMet, one.ttftKnown), seconds(quantile(one.ttft, 0.5)), seconds(quantile(one.ttft, 0.99)), percent(quantile(one.ttftShare, 0.99)),
      share(one.tpotMet, one.tpotKnown), seconds(quantile(one.tpot, 0.5)), seconds(quantile(one.tpot, 0.99)), seconds(target ?? [...one.tpotTargets][0]),
    ];
  });
  fillTable($("classes"), rows, "No service class is known yet.", 13, 1);
}

function showTable(bars, window) {
  const shown = [];
  for (let index = bars.length - 1; index >= 0 && shown.length < TABLE_ROWS; index -= 1) {
    const bar = bars[index];
    if (bar.arrived <= t && (endedAt(bar, t) ?? t) >= t - window) shown.push(cellsOf(bar, t));
  }
  fillTable($("requests"), shown, "No request in this window.", 13, 3, [3, 4, 5, 6, 7, 8, 9, 10]);
}

// Fills a table's body and keeps the cells that are there; columns from `firstNumber` on, or `numbers`, are numbers.
function fillTable(body, rows, none, columns, firstNumber, numbers = null) {
  const isNumber = (column) => (numbers ? numbers.includes(column) : column >= firstNumber);
  if (!rows.length) {
    if (body.dataset.rows !== "0") {
      const cell = document.createElement("td");
      cell.colSpan = columns;
      cell.className = "none";
      cell.textContent = none;
      const row = document.createElement("tr");
      row.append(cell);
      body.replaceChildren(row);
      body.dataset.rows = "0";
    }
    return;
  }
  if (body.dataset.rows === "0") body.replaceChildren();
  body.dataset.rows = String(rows.length);
  while (body.children.length > rows.length) body.lastChild.remove();
  rows.forEach((cells, index) => {
    let row = body.children[index];
    if (!row) {
      row = document.createElement("tr");
      cells.forEach((_, column) => {
        const cell = document.createElement(column ? "td" : "th");
        if (!column) cell.scope = "row";
        if (isNumber(column)) cell.className = "n";
        row.append(cell);
      });
      body.append(row);
    }
    cells.forEach((text, column) => setText(row.children[column], text));
  });
}

function showReplicas(replicas) {
  const box = $("replicas");
  if (!replicas.length) {
    if (box.dataset.count !== "0") {
      const text = document.createElement("p");
      text.className = "note";
      text.textContent = "No replica has announced itself yet.";
      box.replaceChildren(text);
      box.dataset.count = "0";
    }
    return;
  }
  const key = replicas.map((one) => `${one.name}/${one.lanes.length}`).join(" ");
  if (box.dataset.count !== key) {
    box.replaceChildren(...replicas.map(replicaBox));
    box.dataset.count = key;
  }
  replicas.forEach((one, index) => {
    const card = box.children[index];
    setText(card.querySelector(".state"), `${one.state}, epoch ${one.epoch}`);
    setText(card.querySelector(".load"), `${one.model}: ${count(one.running)} running, ${count(one.waiting)} waiting, ${seconds(one.pending)} of prefill ahead`);
    lanesOf(one).forEach((lane, number) => {
      const used = lane.kv_total ? 1 - lane.kv_free / lane.kv_total : 0;
      const row = card.querySelectorAll(".lane")[number];
      const meter = row.children[1];
      meter.setAttribute("aria-valuenow", (100 * used).toFixed(0));
      meter.firstChild.style.width = `${(100 * used).toFixed(1)}%`;
      setText(row.children[2], `KV ${percent(used)}, ${seconds(lane.pending)} ahead`);
    });
  });
}

function lanesOf(replica) {
  return replica.lanes.length ? replica.lanes : [replica];
}

function replicaBox(replica) {
  const card = document.createElement("article");
  card.className = "replica";
  const head = document.createElement("div");
  head.className = "replica-head";
  const name = document.createElement("h3");
  name.textContent = replica.name;
  const state = document.createElement("p");
  state.className = "state";
  head.append(name, state);
  const load = document.createElement("p");
  load.className = "load";
  card.append(head, load);
  lanesOf(replica).forEach((_, number) => {
    const row = document.createElement("div");
    row.className = "lane";
    const label = document.createElement("span");
    label.textContent = `Lane ${number}`;
    const meter = document.createElement("div");
    meter.className = "meter";
    for (const [attribute, value] of Object.entries({ role: "meter", "aria-valuemin": "0", "aria-valuemax": "100", "aria-label": `KV used of lane ${number} of ${replica.name}, per cent` })) meter.setAttribute(attribute, value);
    meter.append(document.createElement("i"));
    row.append(label, meter, document.createElement("span"));
    card.append(row);
  });
  return card;
}

function showConvoy(bars, window) {
  const found = passing(bars, t, window);
  let words = "No long prompt in this window.";
  if (found.longs && !found.shorts) words = `${plural(found.longs, "long prompt", "long prompts")} in this window, and no short request got its first token meanwhile.`;
  if (found.longs && found.shorts) {
    const inTime = found.known ? `${count(found.met)} of ${count(found.known)} in time, ` : "";
    const waited = found.longs === 1 ? "a long prompt waited for its first token" : `${count(found.longs)} long prompts waited for their first tokens`;
    words = `While ${waited}, ${plural(found.shorts, "short request", "short requests")} got theirs: ${inTime}the slowest after ${seconds(found.longest)}.`;
  }
  setText($("convoy"), words);
}

function showEmpty(bars, window) {
  const has = bars.some((bar) => bar.arrived <= t && (endedAt(bar, t) ?? t) >= t - window);
  const words = {
    loading: "Loading",
    lost: "The router does not answer. This page tries again by itself.",
    live: live.ready ? "No request in this window.\nEach request will be a bar here." : "No replica is ready yet.\nRequests will appear here.",
  };
  $("empty").hidden = has;
  if (!has) setText($("empty"), source === live ? words[live.state] : "No request in this window.");
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function notice(text) {
  setText($("notice-text"), text);
  $("notice").hidden = false;
}

function closeNotice() {
  $("notice").hidden = true;
}

// --- selection -------------------------------------------------------------------------------------

function showDetails() {
  const details = $("details");
  if (!selected) {
    setText(details, "Point at a bar, or use the arrow keys, to read its facts.");
    return;
  }
  if (!details.firstElementChild) details.replaceChildren(document.createElement("strong"), document.createTextNode(""));
  setText(details.firstElementChild, selected.id);
  details.lastChild.data = `: ${sentenceOf(selected, t, timeWords)}`;
}

function select(bar, speaks) {
  if (bar === selected) return;
  selected = bar;
  needsDraw = true;
  if (!bar) $("details").replaceChildren();
  showDetails();
  if (speaks) setText($("spoken"), bar ? `${sentenceOf(bar, t, timeWords)}. Request ${bar.id}.` : "");
  if (bar && speaks && view) {
    const box = boxOf(view, bar);
    const scroll = $("scroll");
    if (box.top - 60 < scroll.scrollTop) scroll.scrollTop = Math.max(0, box.top - 60);
    else if (box.top + box.height + 12 > scroll.scrollTop + view.height) scroll.scrollTop = box.top + box.height + 12 - view.height;
  }
}

function visibleBars() {
  const from = t - windowSeconds();
  return source.bars.list.filter((bar) => bar.arrived <= t && (endedAt(bar, t) ?? t) >= from);
}

function step(by) {
  const bars = visibleBars();
  if (!bars.length) return;
  const index = bars.indexOf(selected);
  const next = index < 0 ? (by > 0 ? 0 : bars.length - 1) : Math.min(bars.length - 1, Math.max(0, index + by));
  select(bars[next], true);
}

function stepRow(by) {
  if (!selected || !view) {
    step(by);
    return;
  }
  const middle = (bar) => (Math.max(bar.arrived, t - view.window) + (endedAt(bar, t) ?? t)) / 2;
  const own = boxOf(view, selected).top;
  let best = null;
  for (const bar of visibleBars()) {
    const apart = (boxOf(view, bar).top - own) * by;
    if (apart <= 0) continue;
    const cost = apart * 1e6 + Math.abs(middle(bar) - middle(selected));
    if (best === null || cost < best.cost) best = { bar, cost };
  }
  if (best) select(best.bar, true);
}

function zoom(by) {
  const select = $("window");
  select.selectedIndex = Math.min(select.options.length - 1, Math.max(0, select.selectedIndex + by));
  shortHeight = 0;
  needsDraw = true;
}

function showAs(table) {
  $("bars-view").hidden = table;
  $("table-view").hidden = !table;
  $("as-bars").setAttribute("aria-pressed", String(!table));
  $("as-table").setAttribute("aria-pressed", String(table));
  needsDraw = true;
}

// --- keys, pointers, files ----------------------------------------------------------------------------

function onTimelineKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const actions = {
    ArrowLeft: () => step(-1), ArrowRight: () => step(1), ArrowUp: () => stepRow(-1), ArrowDown: () => stepRow(1),
    Home: () => select(visibleBars()[0] ?? null, true), End: () => select(visibleBars().at(-1) ?? null, true), Escape: () => select(null, true),
  };
  const action = actions[event.key];
  if (action) {
    event.preventDefault();
    action();
  }
}

function onPanelKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const { target, key } = event;
  if (target.matches("select, input[type=file]")) return;
  if (key === " " && target.matches("button, summary")) return;
  const actions = {
    " ": togglePlay, ",": () => seek(t - windowSeconds() / 20), ".": () => seek(t + windowSeconds() / 20),
    "+": () => zoom(-1), "=": () => zoom(-1), "-": () => zoom(1),
    l: goLive, o: () => $("file").click(), t: () => showAs($("table-view").hidden),
  };
  const action = actions[key];
  if (action) {
    event.preventDefault();
    action();
  }
}

function listen() {
  $("play").onclick = togglePlay;
  $("live").onclick = goLive;
  $("open").onclick = () => $("file").click();
  $("file").onchange = (event) => {
    openFile(event.target.files[0]);
    event.target.value = "";
  };
  $("scrub").oninput = (event) => seek(Number(event.target.value));
  $("window").onchange = () => zoom(0);
  $("as-bars").onclick = () => showAs(false);
  $("as-table").onclick = () => showAs(true);
  $("notice-close").onclick = closeNotice;
  $("timeline").addEventListener("keydown", onPanelKey);
  $("scroll").addEventListener("keydown", onTimelineKey);
  $("scroll").addEventListener("scroll", () => {
    needsDraw = true;
  });
  $("canvas").addEventListener("pointermove", (event) => {
    if (view) select(barAt(view, event.offsetX, event.offsetY) ?? selected, false);
  });
  $("canvas").addEventListener("pointerdown", (event) => {
    if (view) select(barAt(view, event.offsetX, event.offsetY), false);
  });
  new ResizeObserver(() => {
    needsDraw = true;
  }).observe($("scroll"));
  dark.addEventListener("change", () => {
    colors = readColors();
    needsDraw = true;
  });
  let depth = 0;
  addEventListener("dragenter", () => {
    depth += 1;
    $("drop").hidden = false;
  });
  addEventListener("dragleave", () => {
    depth -= 1;
    if (depth <= 0) $("drop").hidden = true;
  });
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    depth = 0;
    $("drop").hidden = true;
    openFile(event.dataTransfer.files[0]);
  });
}

makeFigures();
listen();
showDetails();
showStatus();
connect();
requestAnimationFrame(frame);
