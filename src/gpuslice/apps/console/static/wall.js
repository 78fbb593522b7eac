// The wall: nodes as blocks of cards on a canvas, each card filled by the slices that pods hold of it.
import { HUES, hueOf, store, unitsInMiB } from "./store.js";
import { mib, t } from "./words.js";

const GAP_BLOCK = 14;
const ROW = 8; // cards of a node beside each other
export const LARGE = 24; // pixels of a card from which on names are written

/** Where each card of `nodes` stands so that all fit into `width` × `height` if they can, `largest` pixels wide at most. */
export function layout(nodes, width, height, largest = 132) {
  let [size, tooLarge] = [4, Math.max(largest, Math.round(width / 10)) + 1]; // on a large screen a card may be larger
  while (tooLarge - size > 1) { // sizes that fit are below `tooLarge`
    const middle = (size + tooLarge) >> 1;
    const room = place(nodes, middle, width, () => {});
    if (room.height <= height && room.width <= width) size = middle;
    else tooLarge = middle;
  }
  const byName = new Map();
  const placed = place(nodes, size, width, (node, columns, x, y, wide, high) => byName.set(node.name, { node, columns, x, y, width: wide, height: high }));
  return { ...placed, blocks: [...byName.values()], byName };
}

/** Walks over `nodes` from left to right and down; `put` hears where each one's block stands. */
function place(nodes, size, width, put) {
  const large = size >= LARGE;
  const gap = large ? Math.max(4, Math.round(size / 12)) : size >= 8 ? 2 : 1;
  const tall = large ? Math.round(size * 1.25) : size;
  const head = large ? (size >= 58 ? 40 : 22) : 0;
  const foot = size >= 70 ? 20 : 0;
  const between = large ? GAP_BLOCK + 8 : size >= 8 ? 6 : 3;
  let x = 0;
  let y = 0;
  let lineHeight = 0;
  let widest = 0;
  for (const node of nodes) {
    const columns = Math.min(ROW, node.cards.length);
    const rows = Math.ceil(node.cards.length / columns);
    const blockWidth = Math.max(columns * (size + gap) - gap, large ? 120 : 0);
    const blockHeight = head + rows * (tall + gap + foot) - gap;
    if (x && x + blockWidth > width) {
      x = 0;
      y += lineHeight + between;
      lineHeight = 0;
    }
    put(node, columns, x, y, blockWidth, blockHeight);
    widest = Math.max(widest, x + blockWidth);
    lineHeight = Math.max(lineHeight, blockHeight);
    x += blockWidth + between;
  }
  return { size, gap, tall, head, foot, between, width: widest, height: y + lineHeight };
}

/** The cards of a block with their places; made when they are looked at, since there may be tens of thousands. */
export function cellsOf(placed, { node, columns, x, y }) {
  const { size, gap, tall, head, foot } = placed;
  return node.cards.map((card, index) => ({
    node, card, x: x + (index % columns) * (size + gap), y: y + head + Math.floor(index / columns) * (tall + gap + foot), width: size, height: tall,
  }));
}

/** By card of a node, who holds how many units of it: namespaces together, the largest first. */
export function slicesByCard(node) {
  const found = new Map();
  for (const key of store.podsOf.get(node.name) ?? []) {
    const pod = store.tables.pods.get(key);
    for (const [index, units] of pod?.slices ?? []) {
      const slices = found.get(index);
      if (slices) slices.push({ key, pod, units });
      else found.set(index, [{ key, pod, units }]);
    }
  }
  for (const slices of found.values()) {
    if (slices.length > 1) slices.sort((a, b) => (a.pod.namespace < b.pod.namespace ? -1 : a.pod.namespace > b.pod.namespace ? 1 : b.units - a.units));
  }
  return found;
}

/** The slices of a card, and last what is held by pods that the viewer may not see. */
export function slicesOf(node, card) {
  const found = slicesByCard(node).get(card[0]) ?? [];
  const rest = card[3] - found.reduce((sum, each) => sum + each.units, 0);
  return rest > 0 ? [...found, { key: "", pod: null, units: rest }] : found;
}

export function usedRatio(node, card) {
  return ratioOf(store.tables.cardUsage.get(node.name), card);
}

function ratioOf(usage, card) {
  const row = usage?.cards.find((each) => each[0] === card[0]);
  return row && row[2] !== null && card[2] ? Math.min(1, row[2] / card[2]) : null;
}

/** What a pod may count on: what it may borrow is not its own. */
function ownOf(usage) {
  return usage?.borrowed === undefined ? usage?.limit ?? usage?.held : usage.held;
}

/** The part of a card that is held and not used, of those who are measured; null where nobody is. */
export function wasteOf(card, slices) {
  let [waste, measured] = [0, false];
  for (const { key, units } of slices) {
    const usage = store.tables.podUsage.get(key);
    const promised = ownOf(usage);
    if (!promised || usage.used === undefined) continue;
    measured = true;
    waste += (1 - Math.min(1, usage.used / promised)) * units;
  }
  return measured ? Math.min(1, waste / Math.max(card[1], card[3], 1)) : null;
}

export function palette() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return {
    hues: Array.from({ length: HUES + 1 }, (_, index) => read(`--hue${index}`)),
    free: read("--free"), others: read("--others"), text: read("--text"), muted: read("--muted"), faint: read("--faint"),
    bad: read("--bad"), warn: read("--warn"), accent: read("--accent"), surface: read("--surface"), bg: read("--bg"),
    font: getComputedStyle(document.body).fontFamily,
  };
}

/** Draw everything. `matches` says what a search leaves bright; `mode` is "team", "use" or "waste". */
export function draw(canvas, placed, options) {
  const ratio = devicePixelRatio || 1;
  const width = Math.ceil(placed.width) + 4;
  const height = Math.ceil(placed.height) + 4;
  canvas.width = Math.ceil(width * ratio);
  canvas.height = Math.ceil(height * ratio);
  canvas.style.setProperty("width", `${width}px`);
  canvas.style.setProperty("height", `${height}px`);
  paint(canvas, placed, placed.blocks, options);
}

/** Draw again what changed: of thousands of nodes it is a few. */
export function redraw(canvas, placed, names, options) {
  const context = turned(canvas);
  const blocks = [...names].map((name) => placed.byName.get(name)).filter(Boolean);
  const margin = Math.min(2, placed.between / 2); // what marks a selected card reaches beyond it
  for (const { x, y, width, height } of blocks) context.clearRect(x - margin, y - margin, width + 2 * margin, height + 2 * margin);
  paint(canvas, placed, blocks, options);
}

function turned(canvas) {
  const ratio = devicePixelRatio || 1;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 2 * ratio, 2 * ratio);
  return context;
}

function paint(canvas, placed, blocks, { mode, matches, selected }) {
  const context = turned(canvas);
  const colours = palette();
  const large = placed.size >= LARGE;
  const brush = large || blocks !== placed.blocks ? strokes(context, large) : pixels(context);
  const { put } = brush;
  const labels = [];
  const hatched = [];
  for (const block of blocks) {
    const { node } = block;
    const held = slicesByCard(node);
    const usage = mode === "use" ? store.tables.cardUsage.get(node.name) : null;
    for (const cell of cellsOf(placed, block)) {
      const { card, x, y } = cell;
      const slices = held.get(card[0]) ?? [];
      const alpha = !matches || matches(cell, slices) ? 1 : 0.16;
      put(colours.free, alpha, x, y, cell.width, cell.height);
      if (mode !== "team") {
        const part = mode === "use" ? ratioOf(usage, card) : wasteOf(card, slices);
        if (large) drawSlices(cell, slices, colours, alpha, () => {}, labels); // whose they are, in any colour
        if (part !== null) put(mode === "use" ? colours.accent : colours.warn, alpha * 0.85, x, y + cell.height * (1 - part), cell.width, cell.height * part);
      } else {
        drawSlices(cell, slices, colours, alpha, put, large ? labels : null);
      }
      const sick = node.sick?.includes(card[0]);
      if (large && (sick || node.state)) hatched.push({ cell, colour: sick ? colours.bad : colours.faint, alpha });
      if (sick) put(colours.bad, alpha, x, y, cell.width, large ? 4 : Math.max(2, cell.height * 0.45));
      else if (node.state && !large) put(colours.faint, alpha * 0.7, x, y, cell.width, 1.5);
    }
  }
  brush.finish();
  for (const each of hatched) hatch(context, each);
  context.globalAlpha = 1;
  if (large) write(context, placed, blocks, colours, labels, mode);
  const block = selected && placed.byName.get(selected.node);
  const cell = block && blocks.includes(block) && cellsOf(placed, block).find((each) => each.card[0] === selected.card);
  if (cell) {
    context.strokeStyle = colours.text;
    context.lineWidth = 2;
    context.beginPath();
    context.roundRect(cell.x - 1.5, cell.y - 1.5, cell.width + 3, cell.height + 3, large ? 5 : 1);
    context.stroke();
  }
}

function fill(context, colour, list, large) {
  context.fillStyle = colour;
  context.beginPath();
  for (let at = 0; at < list.length; at += 4) {
    if (large && list[at + 3] > 8) context.roundRect(list[at], list[at + 1], list[at + 2], list[at + 3], 3);
    else context.rect(list[at], list[at + 1], list[at + 2], list[at + 3]);
  }
  context.fill();
}

/** What is free of a card out of use, or of a node that takes nobody, is not to be had. */
function hatch(context, { cell: { x, y, width, height }, colour, alpha }) {
  context.save();
  context.beginPath();
  context.roundRect(x, y, width, height, 3);
  context.clip();
  context.globalAlpha = alpha * 0.32;
  context.strokeStyle = colour;
  context.lineWidth = 1.4;
  context.beginPath();
  for (let at = -height; at < width; at += 9) {
    context.moveTo(x + at, y + height);
    context.lineTo(x + at + height, y);
  }
  context.stroke();
  context.restore();
}

/** Rectangles of one colour and brightness are filled in one stroke. */
function strokes(context, large) {
  const rects = new Map(); // brightness → colour → rectangles
  return {
    put(colour, alpha, x, y, w, h) {
      let byColour = rects.get(alpha);
      if (!byColour) rects.set(alpha, (byColour = new Map()));
      const list = byColour.get(colour);
      if (list) list.push(x, y, w, h);
      else byColour.set(colour, [x, y, w, h]);
    },
    finish() {
      for (const [alpha, byColour] of rects) {
        context.globalAlpha = alpha;
        for (const [colour, list] of byColour) fill(context, colour, list, large);
      }
    },
  };
}

/** Tens of thousands of rectangles of a few pixels each: written as pixels that takes a tenth of the time. */
function pixels(context) {
  const { width, height } = context.canvas;
  const ratio = devicePixelRatio || 1;
  const image = context.createImageData(width, height);
  const words = new Uint32Array(image.data.buffer);
  const reader = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const read = (colour) => { // a canvas knows how to read any colour
    reader.fillStyle = colour;
    reader.fillRect(0, 0, 1, 1);
    const [one] = new Uint32Array(reader.getImageData(0, 0, 1, 1).data.buffer);
    known.set(colour, one & 0xffffff);
    return one & 0xffffff;
  };
  return {
    put(colour, alpha, x, y, w, h) {
      const value = ((known.get(colour) ?? read(colour)) | (Math.round(alpha * 255) << 24)) >>> 0;
      const [left, right] = [Math.round((x + 2) * ratio), Math.round((x + w + 2) * ratio)];
      const bottom = Math.round((y + h + 2) * ratio);
      for (let row = Math.round((y + 2) * ratio); row < bottom; row += 1) {
        for (let at = row * width + left; at < row * width + right; at += 1) words[at] = value;
      }
    },
    finish: () => context.putImageData(image, 0, 0),
  };
}

function drawSlices(cell, slices, colours, alpha, put, labels) {
  const { card, x, y, width, height } = cell;
  const total = Math.max(card[1], card[3], 1);
  const known = slices.reduce((sum, each) => sum + each.units, 0);
  let bottom = y + height;
  for (const each of slices) {
    const tall = (each.units / total) * height;
    bottom -= tall;
    const colour = colours.hues[hueOf(each.pod.namespace)];
    if (labels) {
      const usage = store.tables.podUsage.get(each.key);
      const inner = Math.max(1, tall - 2);
      const promised = ownOf(usage);
      const share = promised && usage.used !== undefined ? Math.min(1, usage.used / promised) : null;
      put(colour, alpha * (share === null ? 0.72 : 0.34), x, bottom + 1, width, inner);
      if (share !== null && share > 0) put(colour, alpha * 0.95, x, bottom + 1 + inner * (1 - share), width, Math.max(1.5, inner * share));
      if (width >= 70 && tall >= 17) labels.push({ x, y: bottom, width, height: tall, text: each.pod.name, alpha, refused: usage?.refused > 0, throttled: usage?.throttled > 0 });
    } else {
      put(colour, alpha, x, bottom, width, tall);
    }
  }
  const rest = card[3] - known;
  if (rest > 0) put(colours.others, alpha, x, bottom - (rest / total) * height, width, (rest / total) * height);
  let top = y;
  for (const each of card[2] ? slices : []) { // what is borrowed: narrow, from the top, where nobody requested it
    const tall = Math.min(1, (store.tables.podUsage.get(each.key)?.borrowed ?? 0) / card[2]) * height;
    if (tall > 0) put(colours.hues[hueOf(each.pod.namespace)], alpha * 0.95, x + width / 4, top, width / 2, tall);
    top += tall;
  }
}

/** As much of a name as there is room for: its beginning and its end, which tells replicas apart. */
function fitted(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  for (let kept = text.length - 1; kept > 2; kept -= 1) {
    const tail = Math.min(5, kept >> 1);
    const cut = `${text.slice(0, kept - tail)}…${text.slice(text.length - tail)}`;
    if (context.measureText(cut).width <= width) return cut;
  }
  return `${text.slice(0, 1)}…`;
}

function write(context, placed, blocks, colours, labels, mode) {
  context.textBaseline = "alphabetic";
  for (const { node, x, y, width } of blocks) {
    const held = node.cards.reduce((sum, card) => sum + unitsInMiB(card[3], card), 0);
    const all = node.cards.reduce((sum, card) => sum + (card[2] || unitsInMiB(card[1], card)), 0);
    const twoLines = placed.head >= 40;
    context.font = `600 ${twoLines ? 13 : 11.5}px ${colours.font}`;
    context.fillStyle = colours.text;
    context.fillText(fitted(context, node.name, width), x, y + 12);
    if (!twoLines) continue;
    context.font = `400 12px ${colours.font}`;
    const state = node.state ? `${t(node.state)}  ` : "";
    context.fillStyle = colours.warn;
    context.fillText(state, x, y + 29);
    const aside = context.measureText(state).width;
    context.fillStyle = colours.muted;
    const amounts = `${mib(held)} / ${mib(all)}`;
    const room = width - aside - context.measureText(`${amounts} · `).width;
    const model = node.model && room > 24 ? ` · ${fitted(context, node.model, room)}` : ""; // amounts are never cut
    context.fillText(amounts + model, x + aside, y + 29);
  }
  if (placed.foot) {
    context.font = `400 11.5px ${colours.font}`;
    for (const cell of blocks.flatMap((block) => cellsOf(placed, block))) {
      const sick = cell.node.sick?.includes(cell.card[0]);
      context.fillStyle = sick ? colours.bad : colours.muted;
      const part = mode === "use" ? usedRatio(cell.node, cell.card) : mode === "waste" ? wasteOf(cell.card, slicesOf(cell.node, cell.card)) : null;
      const figure = mode === "team" ? gib(cell.card) : part === null ? "–" : `${Math.round(part * 100)} %`;
      context.fillText(`${cell.card[0]}`, cell.x + 1, cell.y + cell.height + 14);
      context.textAlign = "right";
      context.fillText(figure, cell.x + cell.width - 1, cell.y + cell.height + 14);
      context.textAlign = "left";
    }
  }
  context.font = `520 11.5px ${colours.font}`;
  for (const label of labels) {
    context.globalAlpha = label.alpha;
    context.fillStyle = colours.text;
    const marks = `${label.refused ? "▼" : ""}${label.throttled ? "◆" : ""}`;
    const text = fitted(context, label.text, label.width - 12 - 13 * marks.length);
    const wide = context.measureText(text).width;
    // over the used part a name needs ground of its own to be read
    context.globalAlpha = label.alpha * 0.82;
    context.fillStyle = colours.surface;
    context.beginPath();
    context.roundRect(label.x + 3, label.y + 4, wide + 6, 15, 3);
    if (label.height >= 22) context.fill();
    context.globalAlpha = label.alpha;
    context.fillStyle = colours.text;
    const line = label.y + (label.height >= 22 ? 15.5 : label.height / 2 + 4.5);
    context.fillText(text, label.x + 6, line);
    [...marks].forEach((mark, at) => {
      context.fillStyle = mark === "▼" ? colours.bad : colours.warn;
      context.fillText(mark, label.x + label.width - 13 * (marks.length - at) - 1, line);
    });
  }
  context.globalAlpha = 1;
}

/** "4.2 / 15.8" GiB, which the node's line says: of one card. */
function gib(card) {
  return [unitsInMiB(card[3], card), card[2] || unitsInMiB(card[1], card)].map((each) => (each / 1024).toFixed(each % 1024 && each < 102400 ? 1 : 0)).join(" / ");
}

export function cellAt(placed, x, y) {
  const inside = (each) => x >= each.x - 1 && x <= each.x + each.width + 1 && y >= each.y - 1 && y <= each.y + each.height + 1;
  const block = placed.blocks.find(inside);
  return block && cellsOf(placed, block).find(inside);
}
