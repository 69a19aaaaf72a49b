// Numbers and requests in words.

import { PHASE_NAMES, endedAt, firstAt, phaseAt, prefillOf, tpotOf } from "./bars.js";

export const NONE = "–";

export function count(number) {
  return number.toLocaleString("en");
}

export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  if (value < 0.0995) return `${Math.max(0, value * 1000).toFixed(0)} ms`;
  if (value < 9.95) return `${value.toFixed(2)} s`;
  if (value < 120) return `${value.toFixed(1)} s`;
  const whole = Math.round(value); // before it is divided, or 179.7 s would be 2 min 60 s
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  const minutes = Math.round(value / 60);
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function share(part, whole) {
  if (!whole) return NONE;
  const percent = (100 * part) / whole;
  return `${percent === 100 ? "100" : Math.min(percent, 99.9).toFixed(1)} %`;
}

export function percent(value) {
  return value === null ? NONE : `${(100 * value).toFixed(0)} %`;
}

export function plural(number, one, many) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

const OUTCOMES = { stop: "ended", length: "ended at its token limit", cancelled: "cancelled", moved: "moved to another replica" };

export function stateOf(bar, t) {
  if (endedAt(bar, t) !== null) return OUTCOMES[bar.outcome] ?? `failed: ${bar.outcome}`;
  return PHASE_NAMES[phaseAt(bar, t)];
}

// Time until the first chunk, token or end.
export function waitedOf(bar, t) {
  const start = bar.segments.find((segment) => segment.kind === "chunk" || segment.kind === "decode" || segment.kind === "unreported");
  const began = start && start.start <= t ? start.start : (endedAt(bar, t) ?? t);
  return began - bar.arrived;
}

// Cells of a request's row in the table.
export function cellsOf(bar, t) {
  const prefill = prefillOf(bar, t);
  const first = firstAt(bar, t);
  const ended = endedAt(bar, t) !== null;
  return [
    bar.id,
    stateOf(bar, t),
    bar.class,
    count(bar.prompt),
    seconds(waitedOf(bar, t)),
    prefill.chunks ? count(prefill.chunks) : NONE,
    prefill.chunks ? count(prefill.interruptions) : NONE,
    first === null ? NONE : seconds(first - bar.arrived),
    bar.due === null ? NONE : seconds(bar.due - bar.arrived),
    ended || first !== null ? count(bar.output) : NONE,
    ended ? seconds(tpotOf(bar)) : NONE,
    bar.replica || NONE,
    bar.key || NONE,
  ];
}

// One sentence about a request; `at` gives the words for a time.
export function sentenceOf(bar, t, at) {
  const prefill = prefillOf(bar, t);
  const first = firstAt(bar, t);
  const parts = [`${stateOf(bar, t)}`, `class ${bar.class}`, plural(bar.prompt, "prompt token", "prompt tokens"), `arrived ${at(bar.arrived)}`, `waited ${seconds(waitedOf(bar, t))}`];
  if (prefill.chunks) parts.push(`${plural(prefill.chunks, "chunk", "chunks")}, ${plural(prefill.interruptions, "interruption", "interruptions")}`);
  if (first !== null) parts.push(`first token after ${seconds(first - bar.arrived)}`);
  if (bar.due !== null) parts.push(`due after ${seconds(bar.due - bar.arrived)}`);
  if (endedAt(bar, t) !== null) {
    parts.push(plural(bar.output, "output token", "output tokens"));
    const tpot = tpotOf(bar);
    if (tpot !== null) parts.push(`${seconds(tpot)} each`);
  }
  if (bar.replica) parts.push(`replica ${bar.replica}`);
  if (bar.key) parts.push(`key ${bar.key}`);
  return parts.join(", ");
}
