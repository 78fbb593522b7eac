// Health: what is wrong with the cluster, as `gpuslice doctor` finds it, and which cards are out of use.
import { command, copyable, empty, h, podHref, podLink, replace } from "./dom.js";
import { now, readHealth, store } from "./store.js";
import { say, told } from "./sentences.js";
import { ago, clock, t } from "./words.js";

const FEW = 8;
const SINCE = /^has been waiting since \S+: /;
const COMMANDS = /^(kubectl|gpuslice) [^;,]+(; (kubectl|gpuslice) [^;,]+)*$/;
const KIND = { error: "bad", warning: "warn", note: "", critical: "bad", info: "" };

/** Pods that wait for the same reason are one finding with many places: a queue is mostly of one kind. */
function together(findings) {
  const found = new Map();
  for (const each of findings) {
    const why = each.where.startsWith("pod ") && SINCE.test(each.what) ? each.what.replace(SINCE, "") : null;
    const key = why === null ? each : `${each.level} ${why}`;
    if (found.has(key)) {
      const one = found.get(key);
      one.wheres.push(each.where);
      one.what = why;
    } else found.set(key, { ...each, wheres: [each.where] });
  }
  return [...found.values()];
}

export class HealthView {
  constructor(root) {
    this.root = root;
    this.timer = setInterval(() => this.read(), 10000);
    this.read();
  }

  close() {
    clearInterval(this.timer);
  }

  async read() {
    try {
      await readHealth({ wanted: true });
    } catch {
      // the banner tells of it
    }
  }

  update(query) {
    const found = (this.found = store.health ?? undefined);
    const out = [...store.tables.nodes.values()].filter((node) => node.sick && (!query || node.name.toLowerCase().includes(query)));
    const findings = (found?.findings ?? []).filter((each) => !query || `${each.where} ${each.what} ${say(each.what)}`.toLowerCase().includes(query));
    const alerts = (found?.alerts ?? []).filter((each) => !query || `${each.name} ${each.where}`.toLowerCase().includes(query));
    const cure = (node) => (found?.findings ?? []).find((each) => each.where.endsWith(`/unhealthy-gpu-${node}`))?.fix ?? "–";
    const state = JSON.stringify([alerts, found?.alertsProblem, out.map((node) => [node.name, node.sick, node.reason]), findings, this.found === undefined, document.documentElement.lang]);
    if (state === this.drawn) return;
    this.drawn = state;
    const counts = ["error", "warning", "note"].map((level) => [level, findings.filter((each) => each.level === level).length]).filter(([, number]) => number);
    replace(this.root,
      h("div.row", {}, h("h1", {}, t("health")), counts.map(([level, number]) => h(`span.tag${KIND[level] ? `.${KIND[level]}` : ""}`, {}, `${number} ${t(number === 1 ? level : `${level}s`)}`))),
      out.length ? h("section.panel", {}, h("header", {}, h("h2", {}, t("cardsOut"))), h("div.scroll", {}, h("table", {},
        h("thead", {}, h("tr", {}, [t("node"), t("card"), t("reason"), t("cure"), t("theSame")].map((each) => h("th", { scope: "col" }, each)))),
        h("tbody", {}, out.map((node) => h("tr", {}, h("td.nowrap", {}, h("a", { href: `#/cards/${encodeURIComponent(node.name)}` }, node.name)), h("td", {}, node.sick.join(", ")), h("td.words", {}, node.reason ? told(node.reason) : t("unknown")), h("td.words", {}, told(cure(node.name))), h("td", {}, copyable(command("kubectl", "-n", "kube-system", "get", "cm", `unhealthy-gpu-${node.name}`, "-o", "yaml"))))))))) : null,
      this.alerts(alerts),
      this.found === undefined ? h("p.muted", { role: "status" }, t("reading")) : findings.length
        ? h("section.panel", {}, together(findings).map((each) => this.finding(each)))
        : h("div.panel", {}, empty(t("healthy"), t("healthyText"))),
      this.found && !this.found.whole ? h("p.muted", {}, t("partOnly")) : null,
      h("div.row", {}, h("span.muted", {}, t("notLooked", "gpuslice doctor")), copyable("gpuslice doctor")));
  }

  /** One finding, or the same of many pods. */
  finding(each) {
    const pods = each.wheres.map((where) => /^pod ([^/ ]+)\/([^ ]+)$/.exec(where)).filter(Boolean);
    const where = each.wheres.length > 1
      ? [h("b", {}, t("pods", each.wheres.length)), h("span", {}, pods.slice(0, FEW).map(([, namespace, name], at) => [at ? ", " : "", podLink(namespace, name)]), pods.length > FEW ? ` ${t("more", pods.length - FEW)}` : "")]
      : h("b", {}, pods.length ? h("a", { href: podHref(pods[0][1], pods[0][2]) }, told(each.wheres[0])) : told(each.wheres[0]));
    const fix = each.wheres.length > 1 ? h("a", { href: "#/waiting" }, t("waiting")) : COMMANDS.test(each.fix) ? each.fix.split("; ").map((one) => [copyable(one), " "]) : told(each.fix);
    return h("div.finding", {}, h("span", {}, h(`span.tag${KIND[each.level] ? `.${KIND[each.level]}` : ""}`, {}, t(each.level))),
      h("div", {}, where, h("span", {}, told(each.what)), h("span.muted", {}, `${t("toDo")}: `, fix)));
  }

  /** What Prometheus alerts of, where the console knows one. */
  alerts(alerts) {
    const found = this.found;
    if (!found?.alertsKnown) return null;
    const tag = (each) => h("span", {}, h(`span.tag${KIND[each.severity] ? `.${KIND[each.severity]}` : ""}`, {}, t(each.state || "firing")));
    return h("section.panel", {}, h("header", {}, h("h2", {}, t("alerts"))), alerts.length
      ? alerts.map((each) => h("div.finding", {}, tag(each), h("div", {}, h("b", {}, each.where ? `${each.name}: ${each.where}` : each.name), h("span", {}, told(each.what)), h("span.muted", {}, told(each.fix)),
        h("span.muted.small", { title: clock(each.since) }, each.since ? t("ago", ago(each.since, now())) : ""))))
      : h("div.inside", {}, h("p.muted", {}, told(found.alertsProblem) || t("noAlerts"))));
  }
}
