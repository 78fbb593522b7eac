// What the cluster says, in the reader's language. Events, refusals and what is written into ConfigMaps come as
// English text and nothing else: so a sentence is known by the template that it was made from, and said by another.
import { h } from "./dom.js";
import { clock, currentLanguage, timeOfDay } from "./words.js";

const MOST_KNOWN = 2000;
const BETWEEN_CHINESE = /(?<=[\u3000-\u9fff\uff00-\uffef]) +(?=[\u3000-\u9fff\uff00-\uffef])/g; // spaces of places
const DEEPEST = 4; // sentences in sentences
let templates = []; // of Chinese, the most particular first: what begins with words of its own, then what has most
const known = new Map();

/** Resolves when sentences can be said in the language that was chosen. */
export async function learn() {
  if (currentLanguage() === "en" || templates.length) return;
  const found = await (await fetch("static/sentences.zh.json")).json();
  templates = Object.entries(found).map(([english, chinese]) => template(english, chinese));
  templates.sort((a, b) => b.begins - a.begins || b.particular - a.particular);
}

function template(english, chinese) {
  const parts = english.replace(/\.$/, "").split(/(\{,?\})/);
  const source = parts.map((part, at) => (at % 2 ? "(.+?)" : part.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&"))).join("");
  const lists = parts.filter((_, at) => at % 2).map((part) => part === "{,}");
  return { pattern: new RegExp(`^${source}\\.?$`, "is"), chinese, lists, begins: parts[0].length, particular: english.replace(/\{,?\}/g, "").length };
}

/** What `text` means, or null where no template is like it. */
function turned(text, depth = 0) {
  if (depth > DEEPEST) return null;
  for (const { pattern, chinese, lists } of templates) {
    const found = pattern.exec(text);
    if (!found) continue;
    const part = (given) => (/ |^[A-Z]/.test(given) ? (turned(given, depth + 1) ?? given) : given); // else it is a name
    return chinese.replace(/\{(\d)\}/g, (_, at) => (lists[at] ? found[Number(at) + 1].split(", ").map(part).join("，") : part(found[Number(at) + 1])));
  }
  const sentences = text.split(/(?<=\.) (?=[A-Z])/);
  const each = sentences.length > 1 ? sentences.map((one) => turned(one, depth + 1)) : [null];
  return each.includes(null) ? null : each.join("");
}

function lookedUp(text) {
  if (currentLanguage() === "en" || !/[a-z]/i.test(text ?? "")) return text;
  if (known.size > MOST_KNOWN) known.clear();
  if (!known.has(text)) known.set(text, turned(text)?.replace(BETWEEN_CHINESE, "") ?? null);
  return known.get(text);
}

const MOMENT = /\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z/g;

/** Moments by the reader's clock. */
function inTheirTime(text) {
  const today = new Date().toDateString();
  return text?.replace(MOMENT, (moment) => (new Date(moment).toDateString() === today ? timeOfDay(Date.parse(moment) / 1000) : clock(moment)));
}

/** `text` in the reader's language where it is known, else as it came. */
export function say(text) {
  return inTheirTime(lookedUp(text) ?? text);
}

/** The same for the page: what stays English is marked as that, for those who have it read to them. */
export function told(text) {
  const known = lookedUp(text);
  return known === null ? h("span", { lang: "en" }, inTheirTime(text)) : inTheirTime(known);
}
