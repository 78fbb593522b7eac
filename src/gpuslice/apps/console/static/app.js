// The frame of the page: which view is shown, what stands above it, and the keys that lead to each.
import { CardsView } from "./cards.js";
import { copyable, empty, h, podHref, replace } from "./dom.js";
import { HealthView } from "./health.js";
import { showLogin } from "./login.js";
import { PodView } from "./pod.js";
import { learn, say, told } from "./sentences.js";
import { follow, readHealth, store, subscribe, waitingRows } from "./store.js";
import { TeamsView } from "./teams.js";
import { WaitingView } from "./waiting.js";
import { WasteView } from "./waste.js";
import { count, currentLanguage, setLanguage, span, t } from "./words.js";

const VIEWS = { __proto__: null, cards: CardsView, waiting: WaitingView, teams: TeamsView, waste: WasteView, health: HealthView };
const main = document.getElementById("main");
const preferences = {
  read: (name) => { try { return localStorage.getItem(`gpuslice.${name}`); } catch { return null; } },
  write: (name, value) => { try { localStorage.setItem(`gpuslice.${name}`, value); } catch { /* private windows have none */ } },
};
const dark = matchMedia("(prefers-color-scheme: dark)");
let theme = preferences.read("theme") ?? "auto";
let view = null;
let pending = false;

function applyTheme() {
  const chosen = theme === "auto" ? (dark.matches ? "dark" : "light") : theme;
  document.documentElement.dataset.theme = chosen;
  view?.draw?.();
}

/** The parts of the address behind #, which anybody may have typed. */
function route() {
  const parts = location.hash.replace(/^#\/?/, "").split("/");
  try {
    return parts.map(decodeURIComponent);
  } catch {
    return parts;
  }
}

function open() {
  const [name, ...rest] = route();
  view?.close?.();
  const root = h("div.page");
  if (name === "search") search.value = rest.join("/"); // and it shows the cards
  else if (view?.searched) search.value = ""; // who goes on did not type it
  if (name === "pods") view = new PodView(root, rest[0] ?? "", rest.slice(1).join("/"));
  else view = new (VIEWS[name] ?? CardsView)(root, name === "search" ? [] : rest);
  view.searched = name === "search";
  view.name = name in VIEWS || name === "pods" ? name : "cards";
  document.title = `${t(view.name === "pods" ? "pod" : view.name)} · gpuslice`;
  replace(main, root);
  main.scrollTop = 0;
  header();
  if (store.cluster?.synced) view.update(search.value.trim().toLowerCase());
  else replace(root, unread());
  view.unread = !store.cluster?.synced;
}

/** What stands where nothing has been read yet, or may not be: a view of nothing would be taken for all. */
function unread() {
  const { problems = {}, forbidden = [] } = store.cluster ?? {};
  const why = problems.pods ?? problems.nodes;
  if (!why) return h("p.muted", { role: "status" }, t("reading"));
  return h("div.panel", { role: "status" }, empty(t("notRead"), told(why), forbidden.includes("pods") ? [h("p", {}, t("ownNamespace")), copyable("gpuslice console -n NAMESPACE")] : null));
}

const search = h("input", { type: "search", "aria-label": t("search"), placeholder: t("search"), oninput: () => schedule() });

function header() {
  const waiting = waitingRows().size;
  const sick = [...store.tables.nodes.values()].reduce((sum, node) => sum + (node.sick?.length ?? 0), 0);
  const findings = (store.health?.findings ?? []).reduce((sum, each) => sum + (each.level === "error" ? each.wheres.length : 0), 0) + (store.health?.alerts ?? []).filter((each) => each.severity === "critical").length;
  const badges = { waiting: waiting ? h("span.count.warn", {}, count(waiting)) : null, health: sick + findings ? h("span.count.bad", {}, count(sick + findings)) : null };
  replace(
    document.getElementById("nav"),
    Object.keys(VIEWS).map((name) => h("a", { href: `#/${name}`, "aria-current": view?.name === name ? "page" : null }, t(name), badges[name])),
  );
  document.getElementById("cluster-name").textContent = store.cluster?.name ?? "";
}

function tools() {
  search.setAttribute("placeholder", t("search"));
  search.setAttribute("aria-label", t("search"));
  document.getElementById("skip").textContent = t("skip");
  const next = { auto: "light", light: "dark", dark: "auto" };
  replace(
    document.getElementById("tools"),
    search,
    h("button.quiet", { type: "button", onclick: () => { speak(currentLanguage() === "en" ? "zh" : "en"); preferences.write("language", currentLanguage()); } }, t("language")),
    h("button.quiet", { type: "button", id: "theme", "aria-label": `${t("theme")}: ${t(theme)}`, onclick: () => { theme = next[theme]; preferences.write("theme", theme); applyTheme(); tools(); document.getElementById("theme").focus(); } }, theme === "light" ? "☀" : theme === "dark" ? "☾" : "◐", h("span", {}, ` ${t(theme)}`)),
  );
}

/** Everything in `language`; what the cluster said as soon as its sentences are here. */
function speak(language) {
  setLanguage(language);
  tools();
  open();
  if (currentLanguage() !== "en") learn().then(open, () => {}); // without them it stays English
}

function banner() {
  const element = document.getElementById("banner");
  const problems = store.cluster?.problems ?? {};
  const needed = ["nodes", "pods"].filter((name) => problems[name] && store.cluster.synced && !(store.cluster.forbidden ?? []).includes(name));
  let text = "";
  if (store.failing) text = t("lost", span((Date.now() - store.answeredAt) / 1000));
  else if (needed.length) text = t("apiLost", say(problems[needed[0]]));
  if (element.textContent !== text) element.textContent = text;
}

function schedule() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => {
    pending = false;
    banner();
    if (!store.cluster) return;
    header();
    if (!store.cluster.synced || view?.unread) open();
    else view?.update(search.value.trim().toLowerCase());
    if (store.receivedAt) { // how long an answer took to be seen: bench/console.py reads it
      performance.measure("shown", { start: store.receivedAt });
      store.receivedAt = 0;
      if (performance.getEntriesByName("shown").length > 500) performance.clearMeasures("shown");
    }
  });
}

/** The one pod, or else the one node, whose name holds what was searched for. */
function goToOnlyHit() {
  const query = search.value.trim().toLowerCase();
  const only = (names) => {
    const found = [...names].filter((name) => name.toLowerCase().includes(query));
    return query && found.length ? found.find((name) => name.toLowerCase() === query) ?? (found.length === 1 ? found[0] : null) : null;
  };
  const pod = only(store.tables.pods.keys());
  const node = pod ? null : only(store.tables.nodes.keys());
  if (!pod && !node) return;
  search.value = ""; // and the views after it show everything
  const at = pod?.indexOf("/");
  location.hash = pod ? podHref(pod.slice(0, at), pod.slice(at + 1)) : `#/cards/${encodeURIComponent(node)}`;
}

document.addEventListener("keydown", (event) => {
  const typing = event.target instanceof HTMLInputElement;
  if (event.key === "Escape" && typing) { search.value = ""; search.blur(); schedule(); return; }
  if (event.key === "Enter" && typing && event.target === search) { goToOnlyHit(); return; }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const number = Number(event.key);
  if (number >= 1 && number <= 5) location.hash = `#/${Object.keys(VIEWS)[number - 1]}`;
  else if (event.key === "/") { event.preventDefault(); search.focus(); }
  else if (event.key === "Escape" && view?.name === "pods") history.back();
  else view?.key?.(event);
});

applyTheme();
dark.addEventListener("change", applyTheme);
addEventListener("hashchange", () => { open(); main.focus({ preventScroll: true }); });
speak(preferences.read("language") ?? (navigator.language.startsWith("zh") ? "zh" : "en"));
subscribe(schedule);
setInterval(schedule, 15000); // "3 min ago" grows old
const look = () => readHealth({ wanted: false }).catch(() => {}); // the banner tells of it
setTimeout(look, 1500);
setInterval(look, 30000);
follow(() => showLogin(main).then(open));
