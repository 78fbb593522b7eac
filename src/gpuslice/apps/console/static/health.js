// Health: what is wrong with the cluster, as `gpuslice doctor` finds it, and which cards are out of use.
import { command, copyable, empty, h, podHref, podLink, replace } from "./dom.js";
import { now, readHealth, store } from "./store.js";
import { say, told } from "./sentences.js";
import { ago, clock, t } from "./words.js";

const FEW = 8;
const COMMANDS = /^(kubectl|gpuslice) [^;,]+(; (kubectl|gpuslice) [^;,]+)*$/;
const KIND = { error: "bad", warning: "warn", note: "", critical: "bad", info: "" };

/** How many objects findings are about. */
const objects = (findings) => findings.reduce((sum, each) => sum + each.wheres.length, 0);

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
    const findings = (found?.findings ?? []).filter((each) => !query || `${each.wheres.join(" ")} ${each.what} ${say(each.what)}`.toLowerCase().includes(query));
    const alerts = (found?.alerts ?? []).filter((each) => !query || `${each.name} ${each.where}`.toLowerCase().includes(query));
    const cure = (node) => (found?.findings ?? []).find((each) => each.wheres.some((where) => where.endsWith(`/unhealthy-gpu-${node}`)))?.fix ?? "–";
    const state = JSON.stringify([alerts, found?.alertsProblem, out.map((node) => [node.name, node.sick, node.reason]), findings, this.found === undefined, document.documentElement.lang]);
    if (state === this.drawn) return;
    this.drawn = state;
    const counts = ["error", "warning", "note"].map((level) => [level, objects(findings.filter((each) => each.level === level))]).filter(([, number]) => number);
    replace(this.root,
      h("div.row", {}, h("h1", {}, t("health")), counts.map(([level, number]) => h(`span.tag${KIND[level] ? `.${KIND[level]}` : ""}`, {}, `${number} ${t(number === 1 ? level : `${level}s`)}`))),
      out.length ? h("section.panel", {}, h("header", {}, h("h2", {}, t("cardsOut"))), h("div.scroll", {}, h("table", {},
        h("thead", {}, h("tr", {}, [t("node"), t("card"), t("reason"), t("cure"), t("theSame")].map((each) => h("th", { scope: "col" }, each)))),
        h("tbody", {}, out.map((node) => h("tr", {}, h("td.nowrap", {}, h("a", { href: `#/cards/${encodeURIComponent(node.name)}` }, node.name)), h("td", {}, node.sick.join(", ")), h("td.words", {}, node.reason ? told(node.reason) : t("unknown")), h("td.words", {}, told(cure(node.name))), h("td", {}, copyable(command("kubectl", "-n", "kube-system", "get", "cm", `unhealthy-gpu-${node.name}`, "-o", "yaml"))))))))) : null,
      this.alerts(alerts),
      this.found === undefined ? h("p.muted", { role: "status" }, t("reading")) : findings.length
        ? h("section.panel", {}, findings.map((each) => this.finding(each)))
        : h("div.panel", {}, empty(t("healthy"), t("healthyText"))),
      this.found && !this.found.whole ? h("p.muted", {}, t("partOnly")) : null,
      h("div.row", {}, h("span.muted", {}, t("notLooked", "gpuslice doctor")), copyable("gpuslice doctor")));
  }

  /** One finding, or the same of many objects. */
  finding(each) {
    const pods = each.wheres.map((where) => /^pod ([^/ ]+)\/([^ ]+)$/.exec(where)).filter(Boolean);
    const where = each.wheres.length > 1
      ? [h("b", {}, t(pods.length ? "pods" : "places", each.wheres.length)), h("span", {}, each.wheres.slice(0, FEW).map((where, at) => [at ? ", " : "", pods[at] ? podLink(pods[at][1], pods[at][2]) : told(where)]), each.wheres.length > FEW ? ` ${t("more", each.wheres.length - FEW)}` : "")]
      : h("b", {}, pods.length ? h("a", { href: podHref(pods[0][1], pods[0][2]) }, told(each.wheres[0])) : told(each.wheres[0]));
    const fix = COMMANDS.test(each.fix) ? each.fix.split("; ").map((one) => [copyable(one), " "]) : told(each.fix);
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
