// Waste: who holds memory of cards and does not use it, or uses more than it asked for; one row for each pod.
import { command, copyable, empty, h, podLink, replace } from "./dom.js";
import { amounts, now, store } from "./store.js";
import { BY_NAME, count, mib, span, t } from "./words.js";

const MOST = 200;

/** One row for each pod that holds anything, with what is measured of it. */
export function wasters() {
  const found = [];
  for (const [key, pod] of store.tables.pods) {
    if (!pod.slices) continue;
    const usage = store.tables.podUsage.get(key);
    const idle = usage?.idleSince ? now() - usage.idleSince : null;
    found.push({ key, pod, ...amounts(key, pod), peak: usage?.peak ?? null, owner: usage?.owner ?? "", idle });
  }
  return found;
}

export class WasteView {
  constructor(root) {
    this.root = root;
    this.sort = "unused";
  }

  update(query) {
    this.query = query;
    const all = wasters();
    const rows = all.filter((each) => !query || `${each.key} ${each.pod.node} ${each.owner}`.toLowerCase().includes(query));
    const state = JSON.stringify([rows.map((each) => [each.key, each.held, each.used, each.peak, each.owner, Math.floor((each.idle ?? -60) / 60)]), this.sort, query, document.documentElement.lang]);
    if (state === this.drawn) return;
    this.drawn = state;
    const title = h("div.row", {}, h("h1", {}, t("waste")), copyable(command("gpuslice", "waste")));
    if (!rows.length) {
      replace(this.root, title, query ? h("p.muted", {}, t("nothingFound", query)) : h("div.panel", {}, empty(t("noPods"), t("noPodsText"))));
      return;
    }
    const known = (each) => (each[this.sort] === null || (this.sort === "unused" && each.used === null) ? -1 : each[this.sort]);
    rows.sort((a, b) => known(b) - known(a) || (b.idle ?? -1) - (a.idle ?? -1) || BY_NAME.compare(a.key, b.key));
    const head = (key, label) => h("th.number", { scope: "col", "aria-sort": this.sort === key ? "descending" : null }, h("button", { type: "button", onclick: () => { this.sort = key; this.drawn = ""; this.update(this.query); } }, label, this.sort === key ? " ↓" : ""));
    const focused = document.activeElement?.closest?.("th") ? document.activeElement.textContent : null;
    const sum = (name) => rows.reduce((total, each) => total + (each.used === null ? 0 : each[name]), 0);
    const line = [`${mib(sum("held"))} ${t("held").toLowerCase()}`, `${mib(sum("used"))} ${t("used").toLowerCase()}`, `${mib(sum("unused"))} ${t("unused").toLowerCase()}`];
    if (rows.every((each) => each.used === null)) line.splice(0, 3, `${mib(rows.reduce((total, each) => total + each.held, 0))} ${t("held").toLowerCase()}`, `– ${t("used").toLowerCase()}`); // unknown is not 0
    if (sum("excess")) line.push(`${mib(sum("excess"))} ${t("excess").toLowerCase()}`);
    replace(this.root, title, h("p.muted", {}, line.join(" · ")),
      h("section.panel", {}, h("div.scroll", {}, h("table.wastes", {},
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, t("pod")), head("unused", t("unused")), head("idle", t("idle")), head("held", t("held")), head("used", t("used")), head("peak", t("peak")), h("th", { scope: "col" }, t("owner")), h("th", { scope: "col" }, t("node")))),
        h("tbody", {}, rows.slice(0, MOST).map((each) => this.row(each)))))),
      rows.length > MOST ? h("p.muted", {}, t("more", count(rows.length - MOST))) : null);
    if (focused) [...this.root.querySelectorAll("th button")].find((each) => focused.startsWith(each.textContent.replace(" ↓", "")))?.focus();
  }

  row(each) {
    const figure = (value) => h("td.number", {}, value === null ? "–" : mib(value));
    const over = each.excess > each.held * 0.03 ? h("span.tag.bad", {}, t("beyond", mib(each.excess))) : null;
    return h("tr", {},
      h("td", {}, podLink(each.pod.namespace, each.pod.name)),
      figure(each.used === null ? null : each.unused),
      h("td.number", {}, each.idle === null ? "–" : span(each.idle)),
      figure(each.held),
      h("td.number", {}, each.used === null ? "–" : mib(each.used), over ? " " : null, over),
      figure(each.peak),
      h("td.words", {}, each.owner || "–"),
      h("td.nowrap", {}, h("a", { href: `#/cards/${encodeURIComponent(each.pod.node)}` }, each.pod.node)));
  }
}
