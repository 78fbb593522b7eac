// One pod: its way, what explains it, what it used, who is beside it.
import { busyChart, usageChart } from "./chart.js";
import { command, copyable, empty, h, podHref, replace } from "./dom.js";
import { ask, hueOf, now, store, units, unitsInMiB } from "./store.js";
import { told } from "./sentences.js";
import { asked } from "./waiting.js";
import { ago, clock, mib, span, t } from "./words.js";

const REFRESH_MS = 5000;
const STEPS = { created: "created", decided: "decided", bound: "bound", allocated: "allocatedStep", started: "started" };

export class PodView {
  constructor(root, namespace, name) {
    this.root = root;
    this.namespace = namespace;
    this.podName = name;
    this.key_ = `${namespace}/${name}`;
    this.document = undefined; // null: there is none
    this.readAt = 0;
    this.timer = setInterval(() => this.read(), REFRESH_MS);
  }

  close() {
    clearInterval(this.timer);
  }

  update() {
    if (this.document === undefined || this.row !== store.tables.pods.get(this.key_)) this.read();
  }

  async read() {
    if (this.reading || !store.cluster?.synced) return;
    this.reading = true;
    this.row = store.tables.pods.get(this.key_);
    try {
      this.document = await ask(`pod?namespace=${encodeURIComponent(this.namespace)}&name=${encodeURIComponent(this.podName)}`);
      if (this.root.isConnected && !this.root.contains(getSelection().anchorNode && !getSelection().isCollapsed ? getSelection().anchorNode : null)) this.show();
    } catch {
      // the banner tells that the console does not answer
    } finally {
      this.reading = false;
    }
  }

  show() {
    const found = this.document;
    const focused = document.activeElement?.getAttribute?.("aria-label");
    if (!found) {
      replace(this.root, h("h1.unseen", {}, this.key_), h("div.panel", {}, empty(t("noSuchPod"), t("noSuchPodText"), copyable(command("kubectl", "-n", this.namespace, "get", "pod", this.podName)))));
      return;
    }
    const usage = store.tables.podUsage.get(this.key_) ?? {};
    replace(this.root,
      h("div.stack", {},
        h("div.crumbs.small", {}, h("a", { href: found.node ? `#/cards/${encodeURIComponent(found.node)}` : "#/waiting" }, found.node ? `${t("cards")} / ${found.node}` : t("waiting"))),
        h("div.row", {}, h("h1", {}, h("span.muted", {}, `${found.namespace}/`), found.name), this.phase(found))),
      found.problem ? h("p.tag.bad", {}, told(found.problem)) : null,
      h("section.panel", { "aria-label": t("way") }, h("div.inside", {}, this.way(found))),
      h("section.panel", {}, h("div.inside", {}, this.facts(found, usage))),
      h("div.two", {},
        h("div.stack", {}, this.sentences(found), this.classes(found), this.events(found)),
        h("div.stack", {}, this.chart(found, usage), this.cards(found), this.commands(found))));
    if (focused) [...this.root.querySelectorAll("[aria-label]")].find((each) => each.getAttribute("aria-label") === focused)?.focus({ preventScroll: true });
  }

  phase(found) {
    const row = store.tables.pods.get(this.key_);
    const text = row?.reason || row?.phase || found.phase || "";
    return h(`span.tag.${row?.reason ? "bad" : found.phase === "Running" ? "good" : "warn"}`, {}, text);
  }

  way(found) {
    const last = found.way.findLastIndex((step) => step.done);
    let before = null; // when the last step was of which that is known
    return h("ol.way", {}, found.way.map((step, at) => {
      const time = step.time ? Date.parse(step.time) / 1000 : null;
      const took = time !== null && before !== null ? time - before : null;
      before = time ?? before;
      const when = step.again ? t("again", step.again, ago(step.time, now())) : took === null || took < -2 ? t("ago", ago(step.time, now())) : took < 1 ? t("soon") : `+ ${span(took)}`;
      return h(`li.${step.done ? "done" : "pending"}${at === last ? ".last" : ""}`, {},
        h("b", {}, t(STEPS[step.step])),
        h("span.muted.small", { title: step.time ? clock(step.time) : "" }, step.done ? (time === null ? t("done") : when) : t("notYet")));
    }));
  }

  facts(found, usage) {
    const fact = (label, value) => (value === null || value === undefined || value === "" ? null : h("div", {}, h("dt", {}, label), h("dd", {}, value)));
    const own = this.card(found);
    const gpus = Object.entries(found.gpus ?? {}).map(([card, number]) => `${card}: ${mib(unitsInMiB(number, own))}`).join(", ");
    const better = found.suggestion;
    const row = store.tables.pods.get(this.key_);
    return h("dl.facts", {},
      fact(t("asks"), [asked(row, own), row?.compute ? `, ${t("compute", row.compute)}` : ""]),
      fact(t("node"), found.node), fact(t("card"), gpus),
      fact(t("used"), usage.used === undefined ? null : mib(usage.used)),
      fact(t("borrowed"), usage.borrowed ? mib(usage.borrowed) : null),
      fact(t("limit"), usage.limit === undefined ? (usage.held === undefined ? null : t("noLimit")) : mib(usage.limit)),
      fact(t("excess"), usage.used > (usage.limit ?? usage.held) * 1.03 ? mib(usage.used - (usage.limit ?? usage.held)) : null),
      fact(t("peak"), usage.peak === undefined ? null : mib(usage.peak)),
      fact(t("sm"), usage.sm === undefined ? null : `${Math.round(usage.sm * 100)} %${usage.idleSince ? ` · ${t("idleSince", span(now() - usage.idleSince))}` : ""}`),
      fact(t("refused"), usage.refused ? `${usage.refused} ×` : null),
      fact(t("throttled"), usage.throttled ? span(usage.throttled) : null),
      fact(t("restarts"), row?.restarts || null),
      fact(t("suggested"), better ? (better.more ? t("suggestedMore", units(better.units, own)) : units(better.units, own)) : null));
  }

  /** The first card that it is on, as rows of nodes have them. */
  card(found) {
    return found.card ? [0, found.card.units, found.card.memoryMiB] : null;
  }

  sentences(found) {
    const lines = [...(found.ends ?? []), ...(found.hints ?? [])];
    return lines.length ? h("section.panel.say", {}, h("header", {}, h("h2", {}, t("toSay"))), h("div.inside", {}, h("ul", {}, lines.map((each) => h("li", {}, told(each)))))) : null;
  }

  classes(found) {
    if (!found.classes?.length) return null;
    return h("section.panel", {}, h("header", {}, h("h2", {}, t("whyNot"))), h("div.scroll", {}, h("table", {},
      h("thead", {}, h("tr", {}, h("th.number", { scope: "col" }, t("nodes")), h("th", { scope: "col" }, t("why")), h("th", { scope: "col" }, t("mostFree")))),
      h("tbody", {}, found.classes.map((each) => h("tr", {}, h("td.number", {}, each.nodes.length), h("td.words", {}, told(each.reason)), h("td", {}, each.most === undefined ? "–" : `${mib(unitsInMiB(each.most, store.tables.nodes.get(each.best)?.cards?.find((card) => card[0] === each.card)))} (${each.best}, ${t("cardOf", each.card)})`)))))));
  }

  chart(found, usage) {
    const { history } = found;
    if (!found.node) return null;
    const enough = history.times.length > 0;
    return h("section.panel", {}, h("header", {}, h("h2", {}, t("lastHour")), h("span.muted.small", {}, history.source === "prometheus" ? t("fromPrometheus") : t("fromMemory"))),
      h("div.inside.stack", {}, enough
        ? [usageChart(t("lastHour"), history, usage.limit, usage.peak), this.legend(history, usage),
           history.sm.some((each) => each !== null) ? [h("h3.muted", {}, t("busy")), busyChart(t("busy"), history)] : null]
        : h("p.muted", {}, told(history.problem || store.cluster.usage?.problem || "") || t("noHistory"))));
  }

  /** What the lines of the chart are. */
  legend(history, usage) {
    const line = (kind, text) => h("span", {}, h(`i.stroke.${kind}`), text);
    return h("p.legend", {}, line("line", t("used").toLowerCase()), usage.limit ? line("limit", t("limit")) : null, usage.peak ? line("peak", t("peak")) : null,
      history.refused?.some(Boolean) ? h("span", {}, h("i.refusal", {}, "▼"), t("refusedMark")) : null);
  }

  cards(found) {
    if (!found.gpus) return null;
    const total = found.card?.units * Object.keys(found.gpus).length || Object.values(found.gpus).reduce((sum, each) => sum + each, 0);
    const own = Object.values(found.gpus).reduce((sum, each) => sum + each, 0);
    const slice = (key, number, self) => {
      const at = key.indexOf("/");
      return h(`a${self ? ".self" : ""}`, { href: podHref(key.slice(0, at), key.slice(at + 1)), title: `${key} ${mib(unitsInMiB(number, this.card(found)))}`, vars: { "--share": `${(number / total) * 100}%`, "--hue": `var(--hue${hueOf(key.slice(0, at))})` } }, key.slice(at + 1));
    };
    return h("section.panel", {}, h("header", {}, h("h2", {}, t("neighbours"))), h("div.inside.stack", {},
      found.card ? h("div.cardbar", {}, slice(this.key_, own, true), (found.neighbours ?? []).map((each) => slice(each.pod, each.units))) : null,
      found.neighbours?.length ? h("p.small.muted", {}, found.neighbours.map((each) => `${each.pod} (${mib(unitsInMiB(each.units, this.card(found)))})`).join(", ")) : h("p.small.muted", {}, t("nobody"))));
  }

  events(found) {
    return h("section.panel.events", {}, h("header", {}, h("h2", {}, t("events"))), found.events.length
      ? h("div.scroll", {}, h("table", {}, h("tbody", {}, [...found.events].reverse().map((each) => h("tr", {},
        h("td.nowrap.muted", { title: clock(each.time) }, each.time ? t("ago", ago(each.time, now())) : ""), h("td", {}, h(`span.tag${each.type === "Warning" ? ".warn" : ""}`, {}, each.reason), each.count > 1 ? ` ×${each.count}` : ""), h("td.words", {}, told(each.message)))))))
      : h("div.inside", {}, h("p.muted", {}, told(found.eventsProblem) || t("noEvents"))));
  }

  commands(found) {
    const name = `${found.namespace}/${found.name}`;
    const started = found.way.find((step) => step.step === "started");
    return h("section.panel", {}, h("header", {}, h("h2", {}, t("theSame"))), h("div.inside.stack", {},
      copyable(command("gpuslice", "explain", name)), copyable(command("kubectl", "-n", found.namespace, "describe", "pod", found.name)), started?.done ? copyable(command("kubectl", "-n", found.namespace, "logs", found.name, ...(started.again ? ["--previous"] : []))) : null));
  }
}
