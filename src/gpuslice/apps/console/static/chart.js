// Curves over time: the memory that was used with limit, peak and refusals, and how busy the SMs were.
import { s } from "./dom.js";
import { mib, timeOfDay } from "./words.js";

const WIDTH = 640;
const LEFT = 58;
const BOTTOM = 22;

const SHORTEST_S = 600; // a minute of points across the whole width would look like an hour

export function usageChart(label, { times, used, refused }, limit, peak) {
  return chart(label, times, used, { top: Math.max(limit ?? 0, peak ?? 0, ...used, 1) * 1.08, words: mib, height: 190, limit, peak, refused });
}

export function busyChart(label, { times, sm }) {
  return chart(label, times, sm, { top: 108, words: (value) => `${Math.round(value)} %`, height: 110 });
}

function chart(label, times, used, { top, words, height, limit, peak, refused }) {
  const known = used.filter((each) => each !== null);
  const last = times.at(-1);
  const first = Math.min(times[0], last - SHORTEST_S);
  const x = (time) => LEFT + ((time - first) / (last - first)) * (WIDTH - LEFT - 8);
  const y = (value) => 8 + (1 - value / top) * (height - BOTTOM - 8);
  const pieces = [];
  let piece = [];
  times.forEach((time, at) => {
    if (used[at] === null) {
      if (piece.length) pieces.push(piece);
      piece = [];
    } else piece.push([x(time), y(used[at])]);
  });
  if (piece.length) pieces.push(piece);
  const line = (points) => points.map(([px, py], at) => `${at ? "L" : "M"}${px.toFixed(1)},${py.toFixed(1)}`).join("");
  const level = (value, kind) => s("line", { class: kind, x1: LEFT, x2: WIDTH - 8, y1: y(value), y2: y(value) });
  const steps = [0, 0.5, 1].map((part) => (part * top) / 1.08);
  return s("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": `${label}: ${known.length ? words(known.at(-1)) : ""}` },
    steps.map((value) => [level(value, "grid"), s("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, words(value))]).flat(),
    pieces.map((points) => s("path", { class: "area", d: `${line(points)}L${points.at(-1)[0].toFixed(1)},${y(0)}L${points[0][0].toFixed(1)},${y(0)}Z` })),
    pieces.map((points) => (points.length > 1 ? s("path", { class: "line", d: line(points) }) : s("circle", { class: "dot", cx: points[0][0], cy: points[0][1], r: 3 }))),
    limit ? level(limit, "limit") : null,
    peak ? level(peak, "peak") : null,
    (refused ?? []).map((number, at) => (number ? s("path", { class: "refused", d: `M${x(times[at]).toFixed(1)},${y(limit ?? top / 1.08).toFixed(1)}l-4,-7h8z` }) : null)),
    s("text", { x: LEFT, y: height - 5 }, timeOfDay(first)),
    s("text", { x: WIDTH - 8, y: height - 5, "text-anchor": "end" }, timeOfDay(last)));
}
