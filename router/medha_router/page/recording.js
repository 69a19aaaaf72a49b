// Reads a record of `medha up --record`: one JSON object a line, some of which hold bars that changed, or a replica's load.

import { Bars } from "./bars.js";

export class NotARecord extends Error {}

const RECORD = "Record it with: medha up MANIFEST --record FILE";

// The bars and loads of a record. Throws NotARecord with a text for users.
export function readRecord(text, name) {
  const lines = text.split("\n");
  if (text.startsWith("[")) {
    throw new NotARecord(`${name} is a trace, which ui.perfetto.dev opens. This page replays records. ${RECORD}`);
  }
  const header = parsed(lines[0]);
  if (!header?.spec) throw new NotARecord(`${name} is no record: its first line holds no spec. ${RECORD}`);
  const bars = new Bars(Infinity);
  const loads = [];
  let events = 0;
  let now = 0;
  for (let number = 2; number < lines.length; number += 1) {
    if (!lines[number]) continue;
    const line = parsed(lines[number]);
    if (line === null) {
      if (number >= lines.length - 1) break; // it was cut off when its writer was killed
      throw new NotARecord(`${name}: line ${number + 1} is not JSON. ${RECORD}`);
    }
    if (typeof line.now !== "number") throw new NotARecord(`${name}: line ${number + 1} has no time. ${RECORD}`);
    events += 1;
    now = line.now - (header.origin ?? 0);
    for (const change of line.bars ?? []) bars.apply(change);
    if (line.replica) loads.push({ at: now, replicas: [line.replica] });
  }
  if (!bars.list.length) {
    const why = events ? "it holds no requests, or an earlier release wrote it" : "it holds no events";
    throw new NotARecord(`${name} cannot be replayed: ${why}. ${RECORD}`);
  }
  const origin = Math.min(...bars.list.map((bar) => bar.arrived));
  return { name, bars, loads, began: origin, ended: Math.max(now, ...bars.list.map((bar) => bar.ended ?? 0)), model: header.spec.model?.name ?? "" };
}

// The replicas as they were announced last at time t.
export function replicasAt(loads, t) {
  let low = 0;
  let high = loads.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (loads[middle].at <= t) low = middle + 1;
    else high = middle;
  }
  return loads.length ? loads[Math.max(0, low - 1)].replicas : [];
}

function parsed(line) {
  try {
    const value = JSON.parse(line);
    return typeof value === "object" ? value : null;
  } catch {
    return null;
  }
}
