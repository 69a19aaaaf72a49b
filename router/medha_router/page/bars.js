// Bars of requests as the router sends them or a record holds them, and what can be said of them at one time. No DOM here.

export const LONG_PROMPT_TOKENS = 8192;
export const SHORT_PROMPT_TOKENS = 1024;
export const MOST_BARS = 5000;
const ENDS_WELL = new Set(["stop", "length", "cancelled", "moved"]);

// Adds changes to bars by id. A change holds the fields that are new, and the segments from index `from` on.
export class Bars {
  constructor(mostBars = MOST_BARS) {
    this.mostBars = mostBars;
    this.byNumber = new Map();
    this.openById = new Map();
    this.list = []; // in order of arrival
  }

  apply(change) {
    if (change.dropped) return this.drop(change.number);
    let bar = this.openById.get(change.id);
    if (change.number !== undefined && bar?.number !== change.number) {
      bar = this.byNumber.get(change.number);
      if (!bar) {
        bar = { segments: [], output: 0, last: null };
        this.byNumber.set(change.number, bar);
        this.list.push(bar);
        if (this.list.length > 1 && this.list.at(-2).number > change.number) this.list.sort((a, b) => a.number - b.number);
      }
      this.openById.set(change.id, bar);
    }
    if (!bar) return null;
    const { from, segments, ...fields } = change;
    Object.assign(bar, fields);
    bar.segments.length = Math.min(from, bar.segments.length);
    for (const [kind, start, end, tokens, parts = 1, lane = null] of segments) {
      bar.segments.push({ kind, start, end, tokens, parts, lane });
    }
    bar.output = 0;
    for (const segment of bar.segments) {
      if (segment.kind !== "decode") continue;
      bar.output += segment.tokens;
      bar.last = segment.end;
    }
    return bar;
  }

  // Drops a bar of which no further change will come, unless it has ended.
  drop(number) {
    const bar = this.byNumber.get(number);
    if (!bar || bar.ended !== null) return null;
    this.byNumber.delete(number);
    if (this.openById.get(bar.id) === bar) this.openById.delete(bar.id);
    this.list.splice(this.list.indexOf(bar), 1);
    bar.ended = bar.arrived; // its row is free
    return null;
  }

  // Drops the oldest that have ended; call it after many changes.
  trim() {
    let surplus = this.list.length - this.mostBars;
    if (surplus <= 0) return;
    const kept = [];
    for (const bar of this.list) {
      if (surplus > 0 && bar.ended !== null) {
        surplus -= 1;
        this.byNumber.delete(bar.number);
        if (this.openById.get(bar.id) === bar) this.openById.delete(bar.id);
      } else kept.push(bar);
    }
    this.list = kept;
  }

  get firstAt() {
    return this.list.length ? this.list[0].arrived : 0;
  }
}

export function isLong(bar) {
  return bar.prompt >= LONG_PROMPT_TOKENS;
}

// The phase of a bar at time t: waiting (in the router), placed (at a replica), prefill, decode, or ended.
export function phaseAt(bar, t) {
  if (bar.ended !== null && bar.ended <= t) return "ended";
  let kind = "waiting";
  for (const segment of bar.segments) {
    if (segment.start > t) break;
    kind = segment.kind;
  }
  if (kind === "moved") return "waiting";
  if (kind === "chunk") return "prefill";
  if (kind === "decode") return "decode";
  return kind === "waiting" ? "waiting" : "placed";
}

export const PHASE_NAMES = { waiting: "waiting", placed: "at a replica", prefill: "prefill", decode: "decode", ended: "ended" };

export function firstAt(bar, t) {
  return bar.first !== null && bar.first <= t ? bar.first : null;
}

export function endedAt(bar, t) {
  return bar.ended !== null && bar.ended <= t ? bar.ended : null;
}

export function failed(bar) {
  return bar.outcome !== null && !ENDS_WELL.has(bar.outcome);
}

// True or false once it is known at t whether the first token came in time; null before, and if the client left.
export function ttftMet(bar, t) {
  if (bar.due === null) return null;
  const first = firstAt(bar, t);
  if (first !== null) return first <= bar.due;
  if (endedAt(bar, t) !== null) return failed(bar) ? false : null;
  return t > bar.due ? false : null;
}

export function tpotOf(bar) {
  return bar.output >= 2 && bar.first !== null && bar.last > bar.first ? (bar.last - bar.first) / (bar.output - 1) : null;
}

export function quantile(sorted, share) {
  return sorted.length ? sorted[Math.max(0, Math.ceil(share * sorted.length) - 1)] : null;
}

function emptyFigures() {
  return { requests: 0, waiting: 0, placed: 0, prefill: 0, decode: 0, ttftMet: 0, ttftKnown: 0, tpotMet: 0, tpotKnown: 0, ttft: [], ttftShare: [], tpot: [], tpotTargets: new Set() };
}

function add(figures, bar, t) {
  figures.requests += 1;
  const phase = phaseAt(bar, t);
  if (phase !== "ended") figures[phase] += 1;
  const met = ttftMet(bar, t);
  if (met !== null) {
    figures.ttftKnown += 1;
    figures.ttftMet += met;
  }
  const first = firstAt(bar, t);
  if (first !== null) {
    figures.ttft.push(first - bar.arrived);
    if (bar.due !== null && bar.due > bar.arrived) figures.ttftShare.push((first - bar.arrived) / (bar.due - bar.arrived));
  }
  if (bar.tpot !== null) figures.tpotTargets.add(bar.tpot);
  if (phase === "ended" && !failed(bar) && bar.outcome !== "cancelled" && bar.outcome !== "moved") {
    const tpot = tpotOf(bar);
    if (tpot !== null) {
      figures.tpot.push(tpot);
      if (bar.tpot !== null) {
        figures.tpotKnown += 1;
        figures.tpotMet += tpot <= bar.tpot;
      }
    }
  }
}

// The figures of all requests, and by class, that were open at some time in the window before t.
export function figuresAt(bars, t, window) {
  const all = emptyFigures();
  const classes = new Map();
  for (const bar of bars) {
    if (bar.arrived > t || (endedAt(bar, t) ?? t) < t - window) continue;
    if (!classes.has(bar.class)) classes.set(bar.class, emptyFigures());
    add(all, bar, t);
    add(classes.get(bar.class), bar, t);
  }
  for (const figures of [all, ...classes.values()]) {
    for (const name of ["ttft", "ttftShare", "tpot"]) figures[name].sort((a, b) => a - b);
  }
  return { all, classes };
}

// Short requests that got their first token while a long prompt waited for its own, in the window before t.
export function passing(bars, t, window) {
  const longs = bars.filter((bar) => isLong(bar) && bar.arrived <= t && (firstAt(bar, t) ?? endedAt(bar, t) ?? t) >= t - window);
  const waits = [];
  let met = 0;
  let known = 0;
  for (const bar of bars) {
    const first = firstAt(bar, t);
    if (bar.prompt > SHORT_PROMPT_TOKENS || first === null || first < t - window) continue;
    if (longs.some((long) => long.arrived < bar.arrived && (firstAt(long, t) ?? endedAt(long, t) ?? t) > first)) {
      waits.push(first - bar.arrived);
      if (bar.due !== null) {
        known += 1;
        met += first <= bar.due;
      }
    }
  }
  waits.sort((a, b) => a - b);
  return { longs: longs.length, shorts: waits.length, met, known, longest: waits.at(-1) ?? null };
}

// Prefill of one bar until t: chunks, interruptions between them, and the time it computed.
export function prefillOf(bar, t) {
  let chunks = 0;
  let interruptions = 0;
  let seconds = 0;
  let before = null;
  for (const segment of bar.segments) {
    if (segment.start > t) break;
    if (segment.kind !== "chunk") continue;
    const end = Math.min(segment.end ?? t, t);
    if (before !== null && segment.start - before > 0.02) interruptions += 1;
    chunks += segment.parts;
    seconds += end - segment.start;
    before = end;
  }
  return { chunks, interruptions, seconds };
}

// Gives each bar a row that no other bar has at the same time; long prompts have rows of their own. Rows never change.
export class Rows {
  constructor() {
    this.rows = { long: [], short: [] };
    this.placed = new Map();
  }

  // Places bars that are new, in order of arrival; `gap` seconds stay free between two bars of a row.
  place(bars, gap) {
    for (const bar of bars) {
      if (this.placed.has(bar)) continue;
      const group = isLong(bar) ? "long" : "short";
      const rows = this.rows[group];
      let row = rows.findIndex((last) => last.ended !== null && last.ended + gap <= bar.arrived);
      if (row < 0) row = rows.length;
      rows[row] = bar;
      this.placed.set(bar, row);
    }
  }

  rowOf(bar) {
    return this.placed.get(bar);
  }

  // The number of rows of each group that have a bar in the window before t.
  used(bars, t, window) {
    const most = { long: 0, short: 0 };
    for (const bar of bars) {
      if (bar.arrived > t || (endedAt(bar, t) ?? t) < t - window) continue;
      const group = isLong(bar) ? "long" : "short";
      most[group] = Math.max(most[group], this.placed.get(bar) + 1);
    }
    return most;
  }
}
