// Draws the timeline on a canvas. It decides nothing but places: all facts come from the bars.

import { endedAt, failed, firstAt, isLong } from "./bars.js";

const AXIS = 24;
const HEADING = 22;
const LONG_ROW = 28;
const GROUP_NAMES = { long: "Long prompts: 8,192 tokens or more", short: "Other prompts" };
const STEPS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1200];

// Height of a row of short prompts, by the number of rows.
export function shortRowHeight(rows) {
  if (rows <= 8) return 24;
  if (rows <= 14) return 18;
  return rows <= 40 ? 11 : 7;
}

// Places of the groups, in pixels from the top of all content.
export function layout(used, shortHeight) {
  const longTop = AXIS + HEADING;
  const longBottom = used.long ? longTop + used.long * LONG_ROW : AXIS;
  const shortTop = longBottom + HEADING;
  return { longTop, shortTop, shortHeight, hasLong: used.long > 0, height: shortTop + used.short * shortHeight + 8 };
}

function rowBox(bar, row, places) {
  if (isLong(bar)) return { top: places.longTop + row * LONG_ROW + 3, height: LONG_ROW - 8 };
  const gap = places.shortHeight > 8 ? 4 : 2;
  return { top: places.shortTop + row * places.shortHeight + gap / 2, height: places.shortHeight - gap };
}

// The scale of a view, whose right end is the time `to`: x of a time, and back.
export function scale(view) {
  const gutter = view.width >= 760 ? 92 : 8;
  const inner = view.width - gutter - 10;
  const from = view.to - view.window;
  return {
    gutter,
    from,
    x: (at) => gutter + ((at - from) / view.window) * inner,
    time: (x) => from + ((x - gutter) / inner) * view.window,
    right: gutter + inner,
  };
}

// The bar under a point of the canvas, or null.
export function barAt(view, px, py) {
  const s = scale(view);
  const at = s.time(px);
  const slack = (view.window / Math.max(1, view.width)) * 4;
  let found = null;
  for (const bar of view.bars) {
    if (bar.arrived - slack > at || bar.arrived > view.t) continue;
    const end = endedAt(bar, view.t) ?? view.t;
    if (end + slack < at) continue;
    const box = rowBox(bar, view.rows.rowOf(bar), view.places);
    const y = py + view.scrollTop;
    if (y >= box.top - 2 && y <= box.top + box.height + 2) found = bar;
  }
  return found;
}

// Where a bar is, in pixels from the top of all content.
export function boxOf(view, bar) {
  return rowBox(bar, view.rows.rowOf(bar), view.places);
}

export function draw(context, view, colors) {
  const { width, height, t, scrollTop, places } = view;
  const s = scale(view);
  context.clearRect(0, 0, width, height);
  drawGrid(context, view, s, colors);

  const rects = { waiting: [], chunk: [], decode: [] };
  const hollow = [];
  const dashed = [];
  const dues = [];
  const lates = [];
  const labels = [];
  for (const bar of view.bars) {
    if (bar.arrived > t) continue;
    const end = endedAt(bar, t) ?? t;
    if (end < s.from) continue;
    const row = view.rows.rowOf(bar);
    const box = rowBox(bar, row, places);
    const top = box.top - scrollTop;
    if (top > height || top + box.height < AXIS) continue;
    const middle = Math.floor(top + box.height / 2);
    const x0 = Math.max(s.gutter, s.x(bar.arrived));
    const x1 = Math.max(x0 + 1, s.x(end));
    const thin = box.height > 8 ? 2 : 1;
    rects.waiting.push(x0, middle - thin + 1, x1 - x0, thin);
    addSegments(bar, { s, t, top, middle, height: box.height }, { rects, hollow, dashed });
    addMarks(bar, { s, t, top, middle, height: box.height }, { dues, lates });
    if (isLong(bar)) labels.push([bar, middle]);
    if (bar === view.selected) {
      context.strokeStyle = colors.selected;
      context.lineWidth = 1.5;
      context.strokeRect(x0 - 2.5, top - 2.5, x1 - x0 + 5, box.height + 5);
    }
  }
  for (const [kind, list] of Object.entries(rects)) fill(context, list, colors[kind]);
  context.strokeStyle = colors.chunk;
  context.lineWidth = 1;
  for (const [x, y, w, h] of hollow) context.strokeRect(x + 0.5, y + 0.5, Math.max(1, w - 1), h - 1);
  context.strokeStyle = colors.aside;
  context.lineWidth = 3;
  context.setLineDash([4, 3]);
  for (const [x, y, w] of dashed) {
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(x + w, y);
    context.stroke();
  }
  context.setLineDash([]);
  fill(context, dues, colors.text);
  context.fillStyle = colors.late;
  for (const [x, y, r] of lates) {
    context.beginPath();
    context.moveTo(x, y - r);
    context.lineTo(x + r, y);
    context.lineTo(x, y + r);
    context.lineTo(x - r, y);
    context.fill();
  }
  if (s.gutter > 20) {
    context.fillStyle = colors.surface;
    context.fillRect(0, AXIS, s.gutter - 6, height);
    context.fillStyle = colors.muted;
    context.font = view.font;
    context.textAlign = "right";
    context.textBaseline = "middle";
    const seen = new Set();
    for (const [bar, y] of labels.reverse()) {
      if (seen.has(y)) continue;
      seen.add(y);
      context.fillText(`${bar.prompt.toLocaleString("en")} tok`, s.gutter - 12, y);
    }
  }
  drawHeadings(context, view, colors);
  drawAxis(context, view, s, colors);
  if (view.to > t) {
    context.fillStyle = colors.muted;
    context.fillRect(Math.round(s.x(t)), AXIS - 6, 1, height);
  }
}

function addSegments(bar, { s, t, top, middle, height }, { rects, hollow, dashed }) {
  for (const segment of bar.segments) {
    if (segment.start > t) break;
    const end = Math.min(segment.end ?? t, t);
    if (end < s.from) continue;
    const x0 = Math.max(s.gutter, s.x(segment.start));
    let w = Math.max(1, s.x(end) - x0);
    switch (segment.kind) {
      case "chunk":
        if (w > 3) w -= 0.8; // so that chunks which follow each other can be told apart
        rects.chunk.push(x0, top, w, height);
        break;
      case "decode": {
        const h = Math.max(2, Math.round(height * 0.5));
        rects.decode.push(x0, middle - Math.floor(h / 2), w, h);
        break;
      }
      case "unreported":
        hollow.push([x0, top, w, height]);
        break;
      case "aside":
      case "moved":
        dashed.push([x0, middle, w]);
        break;
    }
  }
}

function addMarks(bar, { s, t, top, middle, height }, { dues, lates }) {
  const first = firstAt(bar, t);
  const ended = endedAt(bar, t);
  const late = bar.due !== null && (first !== null ? first > bar.due : ended === null && t > bar.due);
  if (bar.due !== null && (isLong(bar) || late) && bar.due >= s.from && bar.due <= t) dues.push(s.x(bar.due) - 1, top - 2, 2, height + 4);
  const mark = late ? (first ?? bar.due) : ended !== null && failed(bar) ? ended : null;
  if (mark !== null && mark >= s.from) lates.push([s.x(mark), middle, Math.min(6, Math.max(3.5, height / 2))]);
}

function fill(context, list, color) {
  context.fillStyle = color;
  context.beginPath();
  for (let i = 0; i < list.length; i += 4) context.rect(list[i], list[i + 1], list[i + 2], list[i + 3]);
  context.fill();
}

function ticks(view, s) {
  const most = Math.max(2, Math.floor((s.right - s.gutter) / 90));
  const step = STEPS.find((one) => view.window / one <= most) ?? 3600;
  const offset = view.labelOffset % step;
  const found = [];
  for (let k = Math.ceil((s.from + offset) / step); k * step - offset <= view.to; k += 1) found.push(k * step - offset);
  return found;
}

function drawGrid(context, view, s, colors) {
  context.fillStyle = colors.grid;
  for (const at of ticks(view, s)) context.fillRect(Math.round(s.x(at)), AXIS, 1, view.height);
}

function drawAxis(context, view, s, colors) {
  context.fillStyle = colors.surface;
  context.fillRect(0, 0, view.width, AXIS);
  context.fillStyle = colors.line;
  context.fillRect(0, AXIS - 1, view.width, 1);
  context.fillStyle = colors.muted;
  context.font = view.font;
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (const at of ticks(view, s)) {
    const x = s.x(at);
    if (x > s.gutter + 20 && x < view.width - 26) context.fillText(view.label(at), x, AXIS / 2);
  }
}

function drawHeadings(context, view, colors) {
  const tops = view.places.hasLong ? { long: AXIS, short: view.places.shortTop - HEADING } : { short: AXIS };
  context.font = view.font;
  context.textAlign = "left";
  context.textBaseline = "middle";
  for (const [group, top] of Object.entries(tops)) {
    const y = top - view.scrollTop + HEADING / 2 + 1;
    if (y < AXIS - 10) continue;
    context.fillStyle = colors.surface;
    const text = GROUP_NAMES[group];
    context.fillRect(4, y - 9, context.measureText(text).width + 12, 18);
    context.fillStyle = colors.muted;
    context.fillText(text, 8, y);
  }
}
