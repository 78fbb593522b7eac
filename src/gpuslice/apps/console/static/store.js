// What the page knows of the cluster: tables of rows, brought up to date by asking for what changed.
import { BY_NAME, mib, t } from "./words.js";

const TABLES = ["nodes", "pods", "waiting", "cardUsage", "podUsage", "quotas"];
const RETRY_MS = 2000;

export const store = {
  tables: Object.fromEntries(TABLES.map((name) => [name, new Map()])),
  podsOf: new Map(), // node → keys of its pods
  cluster: null,
  version: "",
  token: sessionStorage.getItem("gpuslice.token") ?? "", // of this tab alone
  answeredAt: 0, // when the console last answered, by this machine's clock
  failing: false,
  receivedAt: 0, // when the newest answer came in, until it is shown
  clockOffset: 0, // the console's clock minus ours, in seconds
  shape: 0, // another number when nodes or their cards came or went
  health: null, // what `gpuslice doctor` finds, of half a minute ago at most
  touched: new Set(), // nodes of which something changed since the wall was drawn
};

const listeners = new Set();

export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function now() {
  return Date.now() / 1000 + store.clockOffset;
}

function keyOf(table, row) {
  return table === "nodes" || table === "cardUsage" ? row.name : `${row.namespace}/${row.name}`;
}

export class Unauthorized extends Error {}

export async function ask(path) {
  const headers = store.token ? { Authorization: `Bearer ${store.token}` } : {};
  const early = globalThis.firstAnswer?.path === path ? globalThis.firstAnswer.answer : null;
  globalThis.firstAnswer = null;
  const answer = await (early ?? fetch(`api/v1/${path}`, { headers, cache: "no-store" }));
  if (answer.status === 401) throw new Unauthorized();
  if (!answer.ok && answer.status !== 404) throw new Error(`${answer.status}`);
  return answer.status === 404 ? null : answer.json();
}

function place(key, row, before) {
  if (before?.node) store.touched.add(before.node);
  if (row?.node) store.touched.add(row.node);
  const left = before?.node && before.node !== row?.node ? store.podsOf.get(before.node) : null;
  if (left?.delete(key) && !left.size) store.podsOf.delete(before.node); // nodes of autoscalers come and go for months
  if (row?.node) {
    if (!store.podsOf.has(row.node)) store.podsOf.set(row.node, new Set());
    store.podsOf.get(row.node).add(key);
  }
}

function touch(table, key) {
  const node = table === "podUsage" ? store.tables.pods.get(key)?.node : table === "nodes" || table === "cardUsage" ? key : "";
  if (node) store.touched.add(node);
}

export function apply(document) {
  if (document.full) {
    for (const table of TABLES) store.tables[table].clear();
    store.podsOf.clear();
    store.shape += 1;
  }
  for (const [table, keys] of Object.entries(document.gone ?? {})) {
    for (const key of keys) {
      const before = store.tables[table].get(key);
      if (table === "pods") place(key, null, before);
      else if (table === "nodes") store.shape += 1;
      else touch(table, key);
      store.tables[table].delete(key);
    }
  }
  for (const table of TABLES) {
    for (const row of document[table] ?? []) {
      const key = keyOf(table, row);
      const before = store.tables[table].get(key);
      if (table === "pods") place(key, row, before);
      else if (table === "nodes" && before?.cards?.length !== row.cards?.length) store.shape += 1;
      else touch(table, key);
      store.tables[table].set(key, row);
    }
  }
  store.cluster = document.cluster;
  store.version = document.version;
  store.clockOffset = document.cluster.now - Date.now() / 1000;
}

export async function follow(onUnauthorized) {
  for (;;) {
    try {
      // who has what is shown first; what is used comes with the next answer, at once
      const document = await ask(`cluster?since=${encodeURIComponent(store.version)}${store.version ? "" : "&figures=later"}`);
      store.answeredAt = Date.now();
      store.failing = false;
      store.receivedAt = performance.now();
      apply(document);
      for (const listener of listeners) listener();
    } catch (error) {
      if (error instanceof Unauthorized) {
        await onUnauthorized();
        continue;
      }
      store.failing = true;
      for (const listener of listeners) listener();
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }
}

/** Pods that wait, by key, with why. Who may not list nodes is not told of that. */
export function waitingRows() {
  if (store.cluster?.mayListNodes) return store.tables.waiting;
  const found = new Map();
  for (const [key, pod] of store.tables.pods) {
    if (!pod.node || pod.reason) found.set(key, { namespace: pod.namespace, name: pod.name, why: "", help: [], never: false });
  }
  return found;
}

/** MiB of one unit on the cards of this cluster, the least and the most: cards differ. */
function unitSizes() {
  if (sizes.shape !== store.shape) {
    const found = [...store.tables.nodes.values()].flatMap((node) => (node.cards ?? []).filter((card) => card[1] && card[2]).map((card) => card[2] / card[1]));
    const [least, most] = found.reduce(([low, high], each) => [Math.min(low, each), Math.max(high, each)], [Infinity, 0]);
    Object.assign(sizes, { shape: store.shape, least: most ? least : 1024, most: most || 1024 });
  }
  return sizes;
}
const sizes = { shape: -1 };

/** What somebody wrote, or is to write: units, with what they are worth on the cards here, or on `card`. */
export function units(number, card) {
  const { least, most } = unitSizes();
  const [low, high] = card ? [unitsInMiB(number, card), unitsInMiB(number, card)] : [number * least, number * most];
  const worth = mib(low) === mib(high) ? mib(low) : `${mib(low)} – ${mib(high)}`;
  return `${number === 1 ? t("oneUnit") : t("manyUnits", number)} (${worth})`;
}

/** MiB that `number` units of a card are, by the card's own size where it is known. */
export function unitsInMiB(number, card) {
  if (card && card[1] && card[2]) return Math.floor((card[2] * number) / card[1]);
  return number * unitSizes().least;
}

/** MiB that a pod holds, of all its cards. */
export function heldBy(pod) {
  if (!pod.slices) return 0;
  if (pod.heldOf === store.shape) return pod.held; // kept in the row, which is another after a change
  const cards = store.tables.nodes.get(pod.node)?.cards;
  let held = 0;
  for (const [index, number] of pod.slices) {
    held += unitsInMiB(number, cards?.find((each) => each[0] === index));
  }
  if (cards) [pod.heldOf, pod.held] = [store.shape, held];
  return held;
}

/** What a pod holds, uses of it, holds in vain and uses beyond it, in MiB; `used` is null where nobody measures it. */
export function amounts(key, pod) {
  const held = heldBy(pod);
  const used = store.tables.podUsage.get(key)?.used ?? null;
  return { held, used, unused: used === null ? 0 : Math.max(0, held - used), excess: used === null ? 0 : Math.max(0, used - held) };
}

/** What a card of a node can hold: of one out of use, or of a node that takes nobody, what is held of it. */
export function capacity(node, card) {
  const takesNobody = node.state || node.sick?.includes(card[0]);
  return takesNobody ? unitsInMiB(card[3], card) : Math.max(card[2], unitsInMiB(card[3], card));
}

/** Sums of the whole cluster in MiB: held = used + unused − excess, of what is measured; free = capacity − held. */
export function totals() {
  const sum = { cards: 0, inUse: 0, sick: 0, capacity: 0, held: 0, heldMeasured: 0, used: 0, unused: 0, excess: 0 };
  for (const node of store.tables.nodes.values()) {
    if (!node.cards) continue;
    sum.sick += node.sick?.length ?? 0;
    for (const card of node.cards) {
      sum.cards += 1;
      sum.held += unitsInMiB(card[3], card);
      sum.capacity += capacity(node, card);
      if (card[3]) sum.inUse += 1;
    }
  }
  for (const [key, { used }] of store.tables.podUsage) {
    const pod = used === undefined ? null : store.tables.pods.get(key);
    if (!pod?.slices) continue;
    const held = heldBy(pod);
    sum.heldMeasured += held;
    sum.used += used;
    if (held > used) sum.unused += held - used;
    else sum.excess += used - held;
  }
  return sum;
}

const LARGE_CLUSTER = 500; // nodes: looking at more of them takes a while, and is done when somebody wants to see it

/** Ask for what is wrong with the cluster; a small one is looked at without being asked for, so that its badge is true. */
export async function readHealth({ wanted }) {
  if (!wanted && (!store.cluster || document.hidden || store.tables.nodes.size > LARGE_CLUSTER)) return;
  store.health = await ask("health");
  for (const listener of listeners) listener();
}

export const HUES = 8;
const assigned = new Map();

/** Which of the hues a namespace has: the largest get one each, for as long as the page is open; HUES is that of all others. */
export function hueOf(namespace) {
  if (!assigned.has(namespace)) {
    if (assigned.size === 0) {
      const held = new Map();
      for (const pod of store.tables.pods.values()) held.set(pod.namespace, (held.get(pod.namespace) ?? 0) + pod.units);
      [...held].sort((a, b) => b[1] - a[1] || BY_NAME.compare(a[0], b[0])).forEach(([name], index) => assigned.set(name, Math.min(index, HUES)));
    }
    if (!assigned.has(namespace)) assigned.set(namespace, Math.min(assigned.size, HUES));
  }
  return assigned.get(namespace);
}
