"use strict";
// Asks whether anything changed; if so, fetches this page again and replaces the parts that differ.
// The form is no such part, so nobody is disturbed while typing. Runs before page.js, which gives
// every table its filter and its order: parts are compared as the service sent them.
const PERIOD = 2000;
const state = document.body.dataset;
const PARTS = "header, nav, main > section";
const sent = new Map();
let failures = 0;
const parts = (root) => Array.from(root.querySelectorAll(PARTS));
for (const part of parts(document)) sent.set(part, part.outerHTML);

function showConnection(look, words) {
  const dot = document.querySelector(".connection");
  dot.className = `connection ${look}`;
  dot.textContent = words;
}

// What a reader did to a part: filters, orders, folds and where they scrolled.
function keepChoices(before, after) {
  const pairs = (selector) => {
    const others = after.querySelectorAll(selector);
    return Array.from(before.querySelectorAll(selector), (one, at) => [one, others[at]]).filter(([, other]) => other);
  };
  for (const [one, other] of pairs("details")) other.open = one.open;
  for (const [one, other] of pairs("th")) {
    const presses = ["ascending", "descending"].indexOf(one.getAttribute("aria-sort")) + 1;
    for (let press = 0; press < presses; press += 1) other.querySelector("button").click();
  }
  for (const [one, other] of pairs(".tools input")) {
    other.value = one.value;
    if (one.value) other.dispatchEvent(new Event("input"));
    if (one === document.activeElement) other.focus();
  }
  for (const [one, other] of pairs(".scroll")) other.scrollTo(one.scrollLeft, one.scrollTop);
}

function replaceParts(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html");
  const old = parts(document), now = parts(fresh);
  const key = (part) => part.dataset.part || part.id || (part.tagName === "SECTION" && part.querySelector("[id]")?.id) || part.tagName;
  const byKey = new Map(old.map((part) => [key(part), part]));
  const keys = new Set(now.map(key));
  for (const part of old) if (!keys.has(key(part))) part.remove();
  let last = null;
  for (const part of now) {
    const html = part.outerHTML, before = byKey.get(key(part));
    if (before && sent.get(before) === html) { last = before; continue; }
    if (before) before.after(part);
    else last.after(part);
    sent.set(part, html);
    enhance(part);
    if (before) { keepChoices(before, part); before.remove(); }
    last = part;
  }
  document.title = fresh.title;
  Object.assign(state, fresh.body.dataset);
}

async function update() {
  const answer = await fetch(state.versionUrl, { cache: "no-store" });
  if (answer.status === 401) return location.reload();
  if (!answer.ok) throw new Error(String(answer.status));
  const now = await answer.json();
  if (now.version !== state.version && getSelection().isCollapsed) {
    const page = await fetch(location.href.split("#")[0], { cache: "no-store" });
    if (page.ok) replaceParts(await page.text());
  }
  const at = now.looked_at ? new Date(now.looked_at).toLocaleTimeString() : "never";
  const what = now.status === "loading" ? "reading the records" : ["live", `${now.running} running`, now.time_left].filter(Boolean).join(", ");
  showConnection("on", `${what}; storage looked at ${at}`);
}

async function poll() {
  if (!document.hidden) {
    try {
      await update();
      failures = 0;
    } catch {
      failures += 1;
      showConnection("off", "no connection; trying again");
    }
  }
  setTimeout(poll, Math.min(PERIOD * 2 ** failures, 60000));
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) update().catch(() => {}); });
if (state.versionUrl) addEventListener("load", poll);
