// Elements are made of text alone: whatever a pod is called, nothing of it is ever read as HTML.
import { t } from "./words.js";

/** An element: `h("a.link", {href, onclick}, "text", child, null)`. */
export function h(what, props, ...children) {
  const [tag, ...classes] = what.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "vars") for (const [each, to] of Object.entries(value)) element.style.setProperty(each, to);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  add(element, children);
  return element;
}

function add(element, children) {
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function replace(element, ...children) {
  element.textContent = "";
  add(element, children);
}

const SVG = "http://www.w3.org/2000/svg";

export function s(tag, props, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  for (const child of children.flat()) {
    if (child !== null) element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

/** A command that a shell takes as it is, whatever the names in it are. */
export function command(...words) {
  return words.map((word) => (/^[\w./:=,@%+-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`)).join(" ");
}

/** The command that shows the same in a terminal, with a button that copies it. */
export function copyable(text) {
  const code = h("code", {}, text);
  return h("span.command", {}, code, copyButton(text, code));
}

/** The same where there is no room for the command: it is the button's hint. */
export function copyOnly(text) {
  const code = h("code.unseen", {}, text);
  return h("span.command", {}, code, copyButton(text, code));
}

function copyButton(text, code) {
  const button = h("button.copy", { type: "button", "aria-label": `${t("copy")}: ${text}`, title: text }, t("copy"));
  button.addEventListener("click", async (event) => {
    event.stopPropagation();
    try {
      await navigator.clipboard.writeText(text);
    } catch {  // no clipboard without TLS: then it is selected, and a key copies it
      const range = document.createRange();
      range.selectNodeContents(code);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
    }
    button.textContent = t("copied");
    setTimeout(() => (button.textContent = t("copy")), 1200);
  });
  return button;
}

export function podHref(namespace, name) {
  return `#/pods/${encodeURIComponent(namespace)}/${encodeURIComponent(name)}`;
}

export function podLink(namespace, name) {
  return h("a.pod", { href: podHref(namespace, name) }, h("span.ns", {}, `${namespace}/`), h("wbr"), name);
}

export function announce(text) {
  document.getElementById("announcer").textContent = text;
}

/** A bar of parts, each a share of the whole; `label` is what a screen reader says. */
export function bar(label, parts) {
  return h(
    "div.bar",
    { role: "img", "aria-label": label, title: label },
    parts.map(([share, kind, color]) =>
      h(`span.${kind}`, { vars: { "--share": `${Math.max(0, Math.min(100, share * 100))}%`, ...(color ? { "--hue": color } : {}) } }),
    ),
  );
}

export function empty(title, text, more) {
  return h("div.empty", {}, h("h2", {}, title), h("p", {}, text), more);
}
