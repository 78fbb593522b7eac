// Waiting: each pod that has no card, or has one and does not run, put together by the reason.
import { command, copyable, empty, h, podLink, replace } from "./dom.js";
import { ask, now, store, units, waitingRows } from "./store.js";
import { told, say } from "./sentences.js";
import { ago, clock, count, t } from "./words.js";

const FEW = 6;

/** Pods made in the same second, as all of one Deployment are, keep the order of their names. */
function oldestFirst(a, b) {
  const [first, second] = [a, b].map((pod) => `${pod.created} ${pod.namespace}/${pod.name}`);
  return first < second ? -1 : Number(first > second);
}

/** What a pod asks for; `card`: the one that it is on. */
export function asked(pod, card) {
  if (!pod?.units) return "–";
  return pod.cards > 1 ? t("wantsMany", units(pod.units / pod.cards, card), pod.cards) : t("wants", units(pod.units, card));
}

export class WaitingView {
  constructor(root) {
    this.root = root;
    this.whole = new Set(); // reasons of which all pods are shown
    this.drawn = "";
    this.whatIf = null;
    this.timer = setInterval(() => this.read(), 30000);
    this.read();
  }

  close() {
    clearInterval(this.timer);
  }

  async read() {
    try {
      this.whatIf = await ask("simulation");
      if (store.cluster?.synced && this.root.isConnected) this.update(this.query ?? "");
    } catch {
      // the banner tells of it
    }
  }

  update(query) {
    this.query = query;
    const groups = new Map();
    for (const [key, row] of waitingRows()) {
      const pod = store.tables.pods.get(key);
      if (!pod || (query && !`${key} ${row.why} ${say(row.why)}`.toLowerCase().includes(query))) continue;
      const id = JSON.stringify([Boolean(pod.node), row.why, row.help, row.never]);
      if (!groups.has(id)) groups.set(id, { id, row, placed: Boolean(pod.node), pods: [] });
      groups.get(id).pods.push(pod);
    }
    const state = JSON.stringify([[...groups.values()].map((each) => [each.id, each.pods.map((pod) => pod.name + pod.created)]), [...this.whole], Math.floor(now() / 15), this.whatIf, document.documentElement.lang, query]);
    if (state === this.drawn) return;
    this.drawn = state;
    const found = [...groups.values()];
    for (const group of found) group.pods.sort(oldestFirst);
    found.sort((a, b) => b.pods.length - a.pods.length || oldestFirst(a.pods[0], b.pods[0]));
    const parts = [[t("notPlaced"), found.filter((each) => !each.placed)], [t("notStarted"), found.filter((each) => each.placed)]];
    if (!found.length) {
      replace(this.root, h("h1", {}, t("waiting")), query ? h("p.muted", {}, t("nothingFound", query)) : h("div.panel", {}, empty(t("noWaiting"), t("noWaitingText"), copyable("gpuslice explain"))));
      return;
    }
    replace(this.root, h("h1.unseen", {}, t("waiting")), parts[0][1].length ? this.simulation() : null, parts.filter(([, each]) => each.length).map(([title, each]) => [
      h("div.row", {}, h("h1", {}, title), h("span.count", {}, count(each.reduce((sum, group) => sum + group.pods.length, 0)))),
      each.map((group) => this.group(group)),
    ]));
  }

  /** What placing everything anew would change, as `gpuslice simulate` finds it. */
  simulation() {
    const found = this.whatIf;
    if (!found?.pods && !found?.tooMany) return null;
    const told = found.tooMany ? [t("whatIfMany", count(found.tooMany))] : [found.placed === found.pods ? t("whatIfAll", count(found.pods)) : t("whatIfSome", count(found.placed), count(found.pods), count(found.pods - found.waiting))];
    if (found.addedNodes) told.push(t("whatIfMore", count(found.addedNodes)));
    if (found.never) told.push(t("whatIfNever", count(found.never)));
    return h("section.panel.whatif", {}, h("p", {}, told.join(" ")), copyable("gpuslice simulate --from-cluster"));
  }

  group({ id, row, pods }) {
    const shown = this.whole.has(id) ? pods : pods.slice(0, FEW);
    return h("section.panel", {},
      h("div.why", {},
        h("div.text", {}, h("h2", {}, row.why ? told(row.why) : t(store.cluster.mayListNodes ? "unknown" : "whyHidden")), row.help.length ? h("ul", { "aria-label": t("wouldHelp") }, row.help.map((each) => h("li", {}, told(each)))) : null),
        row.never ? h("span.tag.bad", {}, t("never")) : null,
        h("span.tag", {}, pods.length === 1 ? t("onePod") : t("pods", count(pods.length)))),
      h("div.scroll", {}, h("table.waits", {},
        h("thead", {}, h("tr", {}, [t("pod"), t("asks"), t("since"), t("theSame")].map((each) => h("th", { scope: "col" }, each)))),
        h("tbody", {}, shown.map((pod) => h("tr", {},
          h("td", {}, podLink(pod.namespace, pod.name), pod.reason ? [" ", h("span.tag.warn", {}, pod.reason)] : null),
          h("td.nowrap", {}, asked(pod)),
          h("td.nowrap", { title: clock(pod.created) }, ago(pod.created, now())),
          h("td", {}, copyable(command("gpuslice", "explain", `${pod.namespace}/${pod.name}`)))))))),
      pods.length > shown.length ? h("div.more", {}, h("button.quiet", { type: "button", onclick: () => { this.whole.add(id); this.drawn = ""; this.update(this.query); } }, t("showAll", count(pods.length)))) : null);
  }
}
