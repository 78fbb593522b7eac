// Cards: the whole cluster as a wall; a click goes to a card, and from there to its pods.
import { announce, bar, command, copyOnly, copyable, empty, h, podLink, replace } from "./dom.js";
import { HUES, heldBy, hueOf, now, store, totals, unitsInMiB, waitingRows } from "./store.js";
import { say, told } from "./sentences.js";
import { BY_NAME, count, mib, span, t } from "./words.js";
import { LARGE, cellAt, cellsOf, draw, layout, redraw, slicesByCard, slicesOf, usedRatio } from "./wall.js";

const LARGE_ENOUGH = 34; // a card of so many pixels need not be zoomed to
const LARGEST_ALONE = 200; // pixels of a card of the one node that is shown
const MOST_ROWS = 300;

/** "4.2 GiB of 15.8 GiB held", of one card. */
function heldOf(card) {
  return t("held2", mib(unitsInMiB(card[3], card)), mib(card[2] || unitsInMiB(card[1], card)));
}

export function percent(part, whole) {
  return whole ? `${Math.round((part / whole) * 100)} %` : "–";
}

export function figures() {
  const sum = totals();
  const waiting = waitingRows().size;
  const figure = (label, value, small, kind, more, href) =>
    h(`${href ? "a" : "div"}.figure${kind ? `.${kind}` : ""}`, { href }, h("span.label", {}, label), h("span.value", {}, value, small ? h("small", {}, small) : null), more);
  return h("div.figures", {},
    figure(t("cardsInUse"), count(sum.inUse), t("of", count(sum.cards))),
    figure(t("allocated"), percent(sum.held, sum.capacity), `${mib(sum.held)} / ${mib(sum.capacity)}`, "", bar(t("allocated"), [[sum.capacity ? sum.held / sum.capacity : 0, "full"]])),
    sum.heldMeasured || store.cluster.usage?.readAt ? figure(t("used"), sum.heldMeasured ? mib(sum.used) : "…", sum.heldMeasured ? t("ofHeld", percent(sum.used, sum.heldMeasured)) : "", "", bar(t("used"), [[sum.heldMeasured ? sum.used / sum.heldMeasured : 0, "full"]])) : null,
    sum.unused ? figure(t("unused"), mib(sum.unused), t("byPod"), "", null, "#/waste") : null,
    sum.excess ? figure(t("excess"), mib(sum.excess), t("byPod"), "bad", null, "#/waste") : null,
    figure(t("waitingPods"), count(waiting), waiting ? t("whyThey") : "", "", null, waiting ? "#/waiting" : null),
    sum.sick ? figure(t("outOfUse"), count(sum.sick), "", "bad", null, "#/health") : null,
  );
}

export class CardsView {
  constructor(root, [node, card]) {
    this.root = root;
    this.focus = node ?? "";
    this.mode = "team";
    this.asTable = false;
    this.selected = card === undefined ? null : { node, card: Number(card) };
    this.query = "";
    root.className = "page wide";
    this.canvas = h("canvas", { tabindex: "0", role: "img", "aria-describedby": "keys" });
    this.wall = h("div.wall.panel", {}, h("div.inside", {}, this.canvas));
    this.side = h("aside.side.panel", { hidden: true, "aria-label": t("card") });
    this.tip = h("div.tip", { hidden: true });
    this.top = h("div.row.spread");
    this.legend = h("div.legend");
    this.body = h("div.split", {}, this.wall, this.side);
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    this.canvas.addEventListener("click", (event) => this.click(event));
    this.canvas.addEventListener("focus", () => { const first = this.placed?.blocks[0]; if (!this.selected && first) this.select(cellsOf(this.placed, first)[0]); });
    this.resized = new ResizeObserver(() => { if (this.room !== this.measure().join()) this.relayout(); });
  }

  close() {
    this.resized.disconnect();
    this.tip.remove();
  }

  nodes() {
    const found = [...store.tables.nodes.values()].filter((node) => node.cards?.length && (!this.focus || node.name === this.focus));
    return found.sort((a, b) => BY_NAME.compare(a.name, b.name));
  }

  update(query) {
    const changed = this.shape !== store.shape;
    const looks = `${query} ${this.mode}`;
    const same = this.looks === looks;
    this.query = query;
    this.looks = looks;
    if (changed) {
      this.list = this.nodes();
      this.positions = new Map(this.list.map((node, at) => [node.name, at]));
      this.shape = store.shape;
    } else for (const name of store.touched) this.refresh(name);
    if (!this.list.length) {
      const blind = !store.cluster.mayListNodes;
      replace(this.root, h("h1.unseen", {}, t("cards")), empty(blind ? t("noNodes") : t("nothingShared"), blind ? "" : t("nothingSharedText"), copyable(blind ? "kubectl auth can-i list nodes" : "kubectl label node NODE cgpu=true")));
      this.mounted = false;
      return;
    }
    if (!this.mounted) {
      replace(this.root, h("h1.unseen", {}, t("cards")), this.top, this.legend, this.body, h("p.unseen", { id: "keys" }, t("keys")));
      document.body.append(this.tip);
      this.resized.observe(this.wall);
      this.mounted = true;
    }
    this.frame();
    if (this.asTable) this.table();
    else if (changed || !this.placed) this.relayout();
    else if (same) redraw(this.canvas, this.placed, store.touched, this.options());
    else this.draw();
    store.touched.clear();
    this.panel();
  }

  /** The row of a node as it is now, wherever the wall has it. */
  refresh(name) {
    const node = store.tables.nodes.get(name);
    const at = this.positions.get(name);
    if (at === undefined || !node?.cards) return;
    this.list[at] = node;
    const block = this.placed?.byName.get(name);
    if (block) block.node = node;
  }

  frame() {
    const press = (name, label, on, act) => h("button", { type: "button", "aria-pressed": String(on), onclick: () => { act(); this.update(this.query); } }, label);
    const focused = document.activeElement?.closest?.(".choice") ? document.activeElement.textContent : null;
    replace(this.top,
      this.focus ? h("div.crumbs", {}, h("a", { href: "#/cards" }, t("allNodes")), h("span.muted", {}, "/"), h("b", {}, this.focus)) : figures(),
      h("div.row", {},
        h("div.choice", { role: "group", "aria-label": t("colourBy") }, press("team", t("team"), this.mode === "team", () => (this.mode = "team")), press("use", t("perf"), this.mode === "use", () => (this.mode = "use")), press("waste", t("waste"), this.mode === "waste", () => (this.mode = "waste"))),
        h("div.choice", { role: "group", "aria-label": t("cards") }, press("wall", t("wall"), !this.asTable, () => { this.asTable = false; this.placed = null; }), press("table", t("table"), this.asTable, () => (this.asTable = true))),
      ),
    );
    if (focused) [...this.top.querySelectorAll(".choice button")].find((each) => each.textContent === focused)?.focus();
    const held = new Map();
    for (const pod of store.tables.pods.values()) {
      if (this.focus ? pod.node === this.focus : pod.node) held.set(pod.namespace, (held.get(pod.namespace) ?? 0) + heldBy(pod));
    }
    const names = [...held].sort((a, b) => b[1] - a[1] || BY_NAME.compare(a[0], b[0]));
    const own = names.filter(([name]) => hueOf(name) < HUES);
    const dot = (color, text, kind = "") => h("span", {}, h(`i.dot${kind}`, { vars: { "--hue": color } }), text);
    const filled = store.tables.podUsage.size > 0 && (this.placed?.size ?? LARGE) >= LARGE;
    const shown = this.focus ? this.list : [...store.tables.nodes.values()];
    const unmeasured = store.cluster.usage?.problem;
    replace(this.legend,
      this.mode === "team" ? own.map(([name, number]) => dot(`var(--hue${hueOf(name)})`, [h("bdi", {}, name), mib(number)])) : this.mode === "use" ? dot("var(--accent)", t("used")) : dot("var(--warn)", t("unused")),
      this.mode === "team" && names.length > own.length ? dot(`var(--hue${HUES})`, t("more", names.length - own.length)) : null,
      this.mode === "team" && filled ? dot("var(--faint)", t("filled"), ".filled") : null,
      dot("var(--free)", t("free")),
      shown.some((node) => node.sick) ? dot("var(--bad)", t("sick")) : null,
      shown.some((node) => node.state) ? dot("var(--faint)", t("closed"), ".hatched") : null,
      this.mode === "team" ? this.marks() : null,
      unmeasured ? h("span", { title: unmeasured }, t("noUsage", say(unmeasured))) : null,
    );
  }

  /** What the marks on slices mean, of those that there are. */
  marks() {
    const usage = [...store.tables.podUsage.values()];
    return [["refused", "bad", "▼", "refusedMark"], ["throttled", "warn", "◆", "throttledMark"]].filter(([name]) => usage.some((each) => each[name]))
      .map(([, colour, mark, text]) => h("span", {}, h("i.mark", { vars: { "--hue": `var(--${colour})` } }, mark), t(text)));
  }

  relayout() {
    if (!this.mounted || this.asTable) return;
    const inside = this.wall.firstElementChild;
    if (!inside.contains(this.canvas)) replace(inside, this.canvas);
    const room = this.measure();
    this.room = room.join();
    this.placed = layout(this.list, ...room, this.focus ? LARGEST_ALONE : undefined);
    this.draw();
  }

  measure() {
    return [Math.max(200, this.wall.clientWidth - 44), Math.max(200, this.wall.clientHeight - 40)];
  }

  options() {
    const query = this.query;
    const matches = query ? (cell, slices) => cell.node.name.toLowerCase().includes(query) || slices.some((each) => each.key.toLowerCase().includes(query)) : null;
    return { mode: this.mode, matches, selected: this.selected };
  }

  draw() {
    if (!this.placed || this.asTable) return;
    draw(this.canvas, this.placed, this.options());
    const sum = totals();
    this.canvas.setAttribute("aria-label", `${t("cards")}: ${sum.cards}, ${t("cardsInUse")} ${sum.inUse}, ${t("allocated")} ${percent(sum.held, sum.capacity)}`);
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    return cellAt(this.placed, event.clientX - box.left - 2, event.clientY - box.top - 2);
  }

  hover(event) {
    const cell = this.at(event);
    this.tip.hidden = !cell;
    this.canvas.style.setProperty("cursor", cell ? "pointer" : "default");
    if (!cell) return;
    replace(this.tip, h("b", {}, `${cell.node.name} · ${t("cardLabel", cell.card[0])}`), h("div", {}, `${heldOf(cell.card)}`),
      slicesOf(cell.node, cell.card).slice(0, 6).map((each) => h("div", {}, `${each.pod ? each.key : t("others")}  ${mib(unitsInMiB(each.units, cell.card))}`)));
    const right = event.clientX + 14 + 340 > innerWidth;
    this.tip.style.setProperty("left", `${right ? event.clientX - 14 - this.tip.offsetWidth : event.clientX + 14}px`);
    this.tip.style.setProperty("top", `${Math.min(event.clientY + 14, innerHeight - this.tip.offsetHeight - 8)}px`);
  }

  click(event) {
    const cell = this.at(event);
    if (cell) this.enter(cell);
    else this.unselect();
  }

  /** A small card first grows with its node; a large one shows what is on it. */
  enter(cell) {
    this.select(cell);
    if (this.placed.size < LARGE_ENOUGH && !this.focus) location.hash = `#/cards/${encodeURIComponent(cell.node.name)}/${cell.card[0]}`;
  }

  select(cell) {
    this.selected = { node: cell.node.name, card: cell.card[0] };
    const pods = slicesOf(cell.node, cell.card).map((each) => (each.pod ? `${each.key} ${mib(unitsInMiB(each.units, cell.card))}` : t("others")));
    announce(`${cell.node.name}, ${t("cardLabel", cell.card[0])}: ${heldOf(cell.card)}. ${pods.join(", ")}`);
    this.draw();
    this.panel();
  }

  unselect() {
    this.selected = null;
    this.draw();
    this.panel();
  }

  key(event) {
    if (event.key === "Escape") {
      if (this.selected) this.unselect();
      else if (this.focus) location.hash = "#/cards";
      return;
    }
    if (this.asTable || document.activeElement !== this.canvas || !this.placed) return;
    const cells = this.placed.blocks.flatMap((block) => cellsOf(this.placed, block));
    const at = cells.findIndex((cell) => this.selected && cell.node.name === this.selected.node && cell.card[0] === this.selected.card);
    const current = cells[Math.max(0, at)];
    let next = null;
    if (event.key === "ArrowRight") next = cells[Math.min(cells.length - 1, at + 1)];
    else if (event.key === "ArrowLeft") next = cells[Math.max(0, at - 1)];
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      const down = event.key === "ArrowDown";
      const beyond = cells.filter((cell) => (down ? cell.y > current.y : cell.y < current.y));
      const line = down ? Math.min(...beyond.map((cell) => cell.y)) : Math.max(...beyond.map((cell) => cell.y));
      next = beyond.filter((cell) => cell.y === line).sort((a, b) => Math.abs(a.x - current.x) - Math.abs(b.x - current.x))[0];
    } else if (event.key === "Enter") {
      this.enter(current);
      this.side.querySelector("a.pod")?.focus();
      return;
    } else return;
    event.preventDefault();
    if (next) this.select(next);
  }

  panel() {
    const node = this.selected && store.tables.nodes.get(this.selected.node);
    const card = node?.cards?.find((each) => each[0] === this.selected.card);
    const was = this.side.hidden;
    this.side.hidden = !card;
    if (was !== this.side.hidden) this.relayout();
    if (!card) return;
    const focused = this.side.contains(document.activeElement);
    if (focused) return; // who reads it is not thrown out of it
    const usage = store.tables.cardUsage.get(node.name)?.cards.find((each) => each[0] === card[0]);
    const sick = node.sick?.includes(card[0]);
    replace(this.side, h("div.inside", {},
      h("div.row.spread", {}, h("h2", {}, t("cardLabel", card[0])), h("button.quiet", { type: "button", "aria-label": t("closePanel"), onclick: () => this.unselect() }, "✕")),
      h("div.stack", {}, h("div", {}, h("a", { href: `#/cards/${encodeURIComponent(node.name)}` }, node.name), h("div.muted.small", {}, [node.model, card[2] ? mib(card[2]) : ""].filter(Boolean).join(" · "))),
        sick ? h("p.tag.bad", {}, t("sick")) : null, sick && node.reason ? h("p.small", {}, told(node.reason)) : null),
      h("div.stack", {},
        h("div.row.spread.small", {}, h("span.muted", {}, t("allocated")), h("span", {}, heldOf(card))),
        bar(t("allocated"), slicesOf(node, card).map((each) => [each.units / Math.max(card[1], card[3]), each.pod ? "full" : "others", each.pod ? `var(--hue${hueOf(each.pod.namespace)})` : ""])),
        usage && usage[2] !== null ? h("div.row.spread.small", {}, h("span.muted", {}, t("used")), h("span", {}, `${mib(usage[2])} · ${percent(usage[2], card[2])}`)) : null,
        usage && usage[3] !== null ? h("div.row.spread.small", {}, h("span.muted", {}, t("sm")), h("span", {}, `${Math.round(usage[3] * 100)} %`)) : null),
      h("ul", {}, slicesOf(node, card).map((each) => this.slice(each, card))),
      h("div.stack", {}, h("h3.muted", {}, t("theSame")), copyable(command("gpuslice", "inspect", "-d", node.name)), copyable(command("kubectl", "describe", "node", node.name))),
    ));
  }

  slice(each, card) {
    if (!each.pod) return h("li", {}, h("div.row.spread", {}, h("span.muted", {}, t("others")), h("span", {}, mib(unitsInMiB(each.units, card)))));
    const usage = store.tables.podUsage.get(each.key);
    const limit = usage?.limit ?? unitsInMiB(each.units, card);
    return h("li", {},
      h("div.row.spread", {}, podLink(each.pod.namespace, each.pod.name), h("span.nowrap", {}, mib(unitsInMiB(each.units, card)))),
      usage?.used !== undefined ? bar(`${t("used")} ${mib(usage.used)}`, [[usage.used / limit, "full", `var(--hue${hueOf(each.pod.namespace)})`]]) : null,
      usage?.used !== undefined ? h("span.muted.small", {}, t("unitsUsed", mib(usage.used)), usage.borrowed ? ` · ${t("borrowed")} ${mib(usage.borrowed)}` : "", usage.refused ? ` · ${t("refused")} ${count(usage.refused)} ×` : "", usage.throttled ? ` · ${t("throttled")} ${span(usage.throttled)}` : "", usage.idleSince ? ` · ${t("idleSince", span(now() - usage.idleSince))}` : "") : null);
  }

  table() {
    const rows = [];
    for (const node of this.list) {
      const slices = slicesByCard(node);
      for (const card of node.cards) {
        const found = slices.get(card[0]) ?? [];
        if (this.query && !node.name.toLowerCase().includes(this.query) && !found.some((each) => each.key.toLowerCase().includes(this.query))) continue;
        rows.push([node, card, found]);
      }
    }
    const shown = rows.slice(0, MOST_ROWS).map(([node, card, found]) => {
      const used = usedRatio(node, card);
      return h("tr", {}, h("td", {}, node.name), h("td.number", {}, card[0]), h("td", {}, node.model ?? ""), h("td.number", {}, heldOf(card)),
        h("td.number", {}, used === null ? "–" : `${Math.round(used * 100)} %`),
        h("td", {}, node.sick?.includes(card[0]) ? h("span.tag.bad", {}, t("sick")) : node.state ? h("span.tag.warn", {}, t(node.state)) : ""),
        h("td", {}, found.slice(0, 12).map((each, at) => [at ? ", " : "", podLink(each.pod.namespace, each.pod.name), ` (${mib(unitsInMiB(each.units, card))})`])),
        h("td", {}, copyOnly(command("gpuslice", "inspect", "-d", node.name))));
    });
    const heads = [t("node"), t("card"), t("model"), t("allocated"), t("used"), t("state"), t("podsColumn"), t("command")];
    replace(this.wall.firstElementChild, h("table", {}, h("thead", {}, h("tr", {}, heads.map((each, at) => h(at === 1 || at === 3 || at === 4 ? "th.number" : "th", { scope: "col" }, each)))), h("tbody", {}, shown)),
      rows.length > MOST_ROWS ? h("p.muted", {}, t("more", count(rows.length - MOST_ROWS))) : null);
  }
}
