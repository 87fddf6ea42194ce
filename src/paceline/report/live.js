"use strict";
// Keeps a page up to date while its server runs: asks for a newer version, and replaces the content by it. What the
// reader has opened, ticked or zoomed stays.
(() => {
  const wait = 2000; // milliseconds between two questions; the server answers 304 while nothing has changed
  const note = document.getElementById("live");
  let version = `"${document.body.dataset.version}"`;

  const keyOf = (details) => details.querySelector("summary").textContent.replace(/\d+/g, "");
  function swap(text) {
    const body = text.replace(/<head>[^]*?<\/head>/, (head) => head.match(/<title>[^]*?<\/title>/)?.[0] ?? "");
    const fresh = new DOMParser().parseFromString(body, "text/html"); // without a style, which the policy would report
    const old = document.getElementById("content"), next = fresh.getElementById("content");
    if (next === null) return;
    const open = new Set([...old.querySelectorAll("details[open]")].map(keyOf));
    const ticked = new Set([...old.querySelectorAll("input:checked")].map((each) => each.value));
    const scrolled = [...old.querySelectorAll(".scroll")].map((each) => each.scrollTop);
    const focused = old.contains(document.activeElement) ? document.activeElement.id : "";
    for (const each of next.querySelectorAll("details")) each.open = open.has(keyOf(each));
    for (const each of next.querySelectorAll("input")) each.checked = ticked.has(each.value);
    old.replaceWith(document.adoptNode(next));
    document.title = fresh.title;
    [...next.querySelectorAll(".scroll")].forEach((each, index) => {
      each.scrollTop = scrolled[index] ?? 0;
    });
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
    document.dispatchEvent(new Event("paceline:refresh"));
  }

  const say = (text) => {
    if (note.textContent !== text) note.textContent = text;
  };
  async function look() {
    if (!document.hidden) {
      try {
        const answer = await fetch(location.href, { headers: { "If-None-Match": version }, cache: "no-store" });
        const found = answer.headers.get("ETag");
        if (answer.status !== 304 && found && found !== version) {
          swap(await answer.text());
          version = found;
        }
        say("");
      } catch {
        say("The server does not answer; this is the last state that it sent.");
      }
    }
    setTimeout(look, wait);
  }
  setTimeout(look, wait);
})();
