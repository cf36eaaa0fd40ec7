"use strict";
// Asks whether anything changed; if so, fetches this page again and puts its parts in place.
// The filters above the table are not such a part, so nobody is disturbed while typing.
const PERIOD = 2000;
const body = document.body;
let failures = 0;

function showConnection(state, words) {
  for (const dot of document.querySelectorAll("[data-connection]")) {
    dot.className = `connection ${state}`;
    dot.textContent = words;
  }
}

function busy() {
  const selected = getSelection();
  return selected && !selected.isCollapsed && selected.toString().length > 0;
}

function replaceParts(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html");
  for (const part of document.querySelectorAll("[data-live]")) {
    const other = fresh.querySelector(`[data-live="${part.dataset.live}"]`);
    if (!other || other.innerHTML === part.innerHTML) continue;
    const before = part.querySelector(".scroll");
    const place = before ? [before.scrollLeft, before.scrollTop] : null;
    part.replaceChildren(...other.childNodes);
    const after = part.querySelector(".scroll");
    if (place && after) [after.scrollLeft, after.scrollTop] = place;
  }
  document.title = fresh.title;
  body.dataset.version = fresh.body.dataset.version;
}

async function update() {
  const answer = await fetch(body.dataset.versionUrl, { cache: "no-store" });
  if (answer.status === 401) return location.reload();
  if (!answer.ok) throw new Error(String(answer.status));
  const now = await answer.json();
  if (now.version !== body.dataset.version && !busy()) {
    const page = await fetch(location.href.split("#")[0], {
      cache: "no-store", headers: { Accept: "text/html" },
    });
    if (page.ok) replaceParts(await page.text());
  }
  showConnection("on", now.running ? `live, ${now.running} running` : "live");
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
for (const list of document.querySelectorAll(".filters select")) {
  list.addEventListener("change", () => list.form.requestSubmit());
}
poll();
