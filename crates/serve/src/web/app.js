// The page's start: which part of it the address asks for, the keys that work everywhere, and whether the server is
// there. Parts stay as they are while another is looked at, so an answer goes on being written.

import { Chat } from "./chat.js";
import { Compare } from "./compare.js";
import { every, h } from "./dom.js";
import { Job } from "./job.js";
import { Load } from "./load.js";
import { isBase, refreshModels } from "./models.js";
import { Tune } from "./tune.js";

const PARTS = { chat: Chat, compare: Compare, tune: Tune, load: Load };
const main = document.getElementById("main");
const server = document.getElementById("server");
const parts = new Map();
let current = null;

function route(event) {
  const [path, query] = location.hash.slice(1).split("?");
  const [name, id] = path.split("/");
  const part = made(name in PARTS ? name : "chat", id);
  const moved = part !== current;
  if (moved) {
    current?.leave?.();
    current = part;
    main.replaceChildren(part.element);
    document.title = `${part.title} · metal-candle`;
    for (const link of document.querySelectorAll("nav a")) {
      if (link.hash === `#${name || "chat"}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    scrollTo(0, 0);
    if (event) main.focus({ preventScroll: true });
  }
  part.enter(new URLSearchParams(query));
}

// Jobs are many, and one that is looked at again is read again.
function made(name, id) {
  if (name === "tune" && id) return current?.id === id ? current : new Job(id);
  if (!parts.has(name)) parts.set(name, new PARTS[name]());
  return parts.get(name);
}

async function look() {
  try {
    const base = (await refreshModels()).find(isBase);
    server.replaceChildren(h("span.dot.good"), h("span", base?.id ?? "ready"));
  } catch (error) {
    server.replaceChildren(h("span.dot.bad"), h("span", error.status ? error.message : "not reachable"));
  }
}

addEventListener("hashchange", route);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.defaultPrevented && !document.querySelector("dialog[open]")) current.stop?.();
});
route();
every(10_000, look);
