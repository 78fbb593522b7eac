// Teams: who holds how much, uses how much of it, and what could be given back.
import { bar, command, copyOnly, copyable, empty, h, podLink, replace } from "./dom.js";
import { amounts, ask, hueOf, now, store, units } from "./store.js";
import { told } from "./sentences.js";
import { BY_NAME, count, mib, span, t } from "./words.js";

const IDLE_S = 600;
const MOST = 100;

function none(namespace) {
  return { namespace, pods: 0, heldMiB: 0, usedMiB: 0, unusedMiB: 0, measured: 0, idle: 0, waiting: 0, quotas: [] };
}

/** One row a namespace. What is not measured is not counted as used or unused. */
export function teams() {
  const found = new Map();
  const of = (namespace) => {
    if (!found.has(namespace)) found.set(namespace, none(namespace));
    return found.get(namespace);
  };
  for (const [key, pod] of store.tables.pods) {
    const team = of(pod.namespace);
    if (!pod.node) {
      team.waiting += 1;
      continue;
    }
    team.pods += 1;
    const own = amounts(key, pod);
    team.heldMiB += own.held;
    team.unusedMiB += own.unused;
    if (own.used !== null) [team.usedMiB, team.measured] = [team.usedMiB + own.used, team.measured + own.held];
    const idleSince = store.tables.podUsage.get(key)?.idleSince;
    if (idleSince && now() - idleSince >= IDLE_S) team.idle += own.held;
  }
  for (const quota of store.tables.quotas.values()) of(quota.namespace).quotas.push(quota);
  return [...found.values()];
}

/** A card, as rows of nodes have them, of which `number` units are `mib`. */
function worth(number, mib) {
  return [0, number, mib];
}

function amount(hours) {
  return count(hours < 0.1 ? Math.round(hours * 100) / 100 : hours < 10 ? Math.round(hours * 10) / 10 : Math.round(hours));
}

export class TeamsView {
  constructor(root) {
    this.root = root;
    this.sort = "unused";
    this.advice = null;
    this.hours = null;
    this.timer = setInterval(() => this.read(), 15000);
    this.read();
  }

  close() {
    clearInterval(this.timer);
  }

  async read() {
    try {
      [this.advice, this.hours] = await Promise.all([ask("advice"), ask("teams")]);
      this.drawn = "";
      if (store.cluster?.synced && this.root.isConnected) this.update(this.query ?? "");
    } catch {
      // the banner tells of it
    }
  }

  update(query) {
    this.query = query;
    const all = teams();
    const found = new Set(all.map((team) => team.namespace));
    const rows = all.filter((team) => !query || team.namespace.toLowerCase().includes(query));
    const state = JSON.stringify([rows, this.sort, this.advice, this.hours, query, document.documentElement.lang]);
    if (state === this.drawn) return;
    this.drawn = state;
    for (const each of this.hours?.hours ?? []) if (!found.has(each.namespace) && each.held && (!query || each.namespace.toLowerCase().includes(query))) rows.push(none(each.namespace)); // its last pod is gone, its hours are not
    const unused = (team) => team.unusedMiB;
    const hours = new Map((this.hours?.hours ?? []).map((each) => [each.namespace, each]));
    const order = { hours: (team) => hours.get(team.namespace)?.held ?? 0, unused, units: (team) => team.heldMiB, idle: (team) => team.idle, waiting: (team) => team.waiting, back: (team) => this.back(team) };
    rows.sort((a, b) => order[this.sort](b) - order[this.sort](a) || b.heldMiB - a.heldMiB || BY_NAME.compare(a.namespace, b.namespace));
    const focused = document.activeElement?.closest?.("th") ? document.activeElement.textContent : null;
    if (!rows.length) {
      replace(this.root, h("h1", {}, t("teams")), h("div.panel", {}, empty(t("noTeams"), t("noTeamsText"))));
      return;
    }
    const most = Math.max(...rows.map((team) => team.heldMiB), 1);
    const head = (key, label) => h("th.number", { scope: "col", "aria-sort": this.sort === key ? "descending" : null }, h("button", { type: "button", onclick: () => { this.sort = key; this.drawn = ""; this.update(this.query); } }, label, this.sort === key ? " ↓" : ""));
    replace(this.root, h("h1", {}, t("teams")),
      h("section.panel", {}, h("div.scroll", {}, h("table", {},
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, t("namespace")), h("th", { scope: "col", "aria-sort": this.sort === "units" ? "descending" : null }, h("button", { type: "button", onclick: () => { this.sort = "units"; this.drawn = ""; this.update(this.query); } }, `${t("used")} / ${t("held")}`, this.sort === "units" ? " ↓" : "")), head("unused", t("unused")), head("idle", t("idle")), head("back", t("giveBack")), head("hours", t("hours")), h("th.number", { scope: "col" }, t("smHours")), h("th.number", { scope: "col" }, t("podsColumn")), head("waiting", t("waiting")), h("th.number", { scope: "col" }, t("quota")), h("th", { scope: "col" }, t("command")))),
        h("tbody", {}, rows.slice(0, MOST).map((team) => this.team(team, most, unused(team), hours.get(team.namespace))))))),
      this.hours?.span || this.hours?.problem ? h("p.muted.small", {}, told(this.hours.problem) || t("hoursOf", span(this.hours.span))) : null,
      this.panel());
    if (focused) [...this.root.querySelectorAll("th button")].find((each) => focused.startsWith(each.textContent.replace(" ↓", "")))?.focus();
  }

  back(team) {
    return this.advice?.namespaces?.find((each) => each.namespace === team.namespace)?.mib ?? 0;
  }

  team(team, most, unused, hours) {
    const hue = `var(--hue${hueOf(team.namespace)})`;
    const label = `${t("used")} ${mib(team.usedMiB)}, ${t("held")} ${mib(team.heldMiB)}`;
    const quota = team.quotas.map((each) => each.of === "units" ? `${each.used} / ${units(each.hard)}` : `${each.used} / ${each.hard} ${t(`of_${each.of}`)}`).join(", ");
    return h("tr", {},
      h("td", {}, h("span.row.nowrap", {}, h("i.dot", { vars: { "--hue": hue } }), h("a.pod", { href: `#/search/${encodeURIComponent(team.namespace)}` }, team.namespace))),
      h("td", {}, bar(label, [[team.usedMiB / most, "full", hue], [(team.heldMiB - team.usedMiB) / most, "pale", hue]]), h("span.muted.small.nowrap", {}, team.measured ? `${mib(team.usedMiB)} / ${mib(team.heldMiB)}` : mib(team.heldMiB))),
      h("td.number", {}, team.measured ? `${mib(unused)} · ${Math.round((unused / team.measured) * 100)} %` : "–"),
      h("td.number", {}, team.idle ? mib(team.idle) : "–"),
      h("td.number", {}, this.back(team) ? mib(this.back(team)) : "–"),
      h("td.number", {}, hours ? [amount(hours.held), hours.used === null ? null : h("span.muted.small", {}, ` · ${amount(hours.used)} ${t("hoursUsed")}`)] : "–"),
      h("td.number", {}, hours && hours.sm !== null ? amount(hours.sm) : "–"),
      h("td.number", {}, count(team.pods)),
      h("td.number", {}, team.waiting ? h("a", { href: "#/waiting" }, count(team.waiting)) : "–"),
      h("td.number", {}, quota || "–"),
      h("td", {}, copyOnly(command("gpuslice", "advise", "-n", team.namespace))));
  }

  panel() {
    const advice = this.advice;
    if (!advice) return null;
    const same = copyable("gpuslice advise");
    if (!advice.resizes?.length && !advice.cards?.length) return h("section.panel", {}, h("header", {}, h("h2", {}, t("advice"))), h("div.inside.stack", {}, h("p.muted", {}, told(advice.problem) || t("noAdvice")), same));
    return [
      h("div.row", {}, h("h1", {}, t("advice")), same),
      h("p.muted", {}, t("adviceRisk")),
      advice.resizes.length ? h("section.panel", {}, h("header", {}, h("h2", {}, t("resize"))), h("div.scroll", {}, h("table", {},
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, t("pod")), h("th.number", { scope: "col" }, t("now")), h("th.number", { scope: "col" }, t("peak")), h("th.number", { scope: "col" }, t("suggestedShort")), h("th", { scope: "col" }, t("theSame")))),
        h("tbody", {}, advice.resizes.slice(0, MOST).map((each) => h("tr", {}, h("td", {}, podLink(each.namespace, each.pod)), h("td.number", {}, units(each.units, worth(each.units, each.mib))), h("td.number", {}, mib(each.peakMiB)),
          h("td.number", {}, h(`span.tag.${each.more ? "warn" : "good"}`, {}, each.more ? t("suggestedMore", units(each.suggestedUnits, worth(each.suggestedUnits, each.suggestedMiB))) : each.suggestedUnits ? units(each.suggestedUnits, worth(each.suggestedUnits, each.suggestedMiB)) : t("neverUsed"))), h("td", {}, copyable(command("gpuslice", "explain", `${each.namespace}/${each.pod}`))))))))) : null,
      advice.cards.length ? h("section.panel", {}, h("header", {}, h("h2", {}, t("emptyCards"))), h("div.scroll", {}, h("table", {},
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, t("card")), h("th", { scope: "col" }, t("moves")))),
        h("tbody", {}, advice.cards.slice(0, MOST).map((each) => h("tr", {}, h("td.nowrap", {}, `${each.node}, ${t("cardOf", each.card)}`), h("td", {}, each.moves.map((move) => h("div", {}, podLink(move.namespace, move.pod), ` ${mib(move.mib)} ${t("to")} ${move.node}, ${t("cardOf", move.card)}`))))))))) : null,
    ];
  }
}
