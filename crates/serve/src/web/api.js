// Requests to the server this page came from, which speaks OpenAI's API.

import { keep, recall } from "./dom.js";

export class ApiError extends Error {
  constructor(status, { message, param } = {}) {
    super(message || `The server answered ${status} without a word of why.`);
    this.status = status;
    this.param = param;
  }
}

const KEY = "metal-candle.key";
let asking = null;
// Whoever would rather give no key isn't asked again by what a page does of itself.
let declined = false;
addEventListener("hashchange", () => (declined = false));

// Asks for a key once, however many requests wait for one; false if the person would rather not.
function askForKey(problem) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key");
    const form = dialog.querySelector("form");
    dialog.querySelector(".problem").textContent = recall(sessionStorage, KEY) ? problem : "";
    form.onsubmit = (event) => {
      event.preventDefault();
      keep(sessionStorage, KEY, form.elements.key.value.trim());
      dialog.close("given");
    };
    form.elements.cancel.onclick = () => dialog.close("");
    dialog.onclose = () => {
      form.reset();
      asking = null;
      declined = dialog.returnValue !== "given";
      resolve(!declined);
    };
    dialog.returnValue = "";
    dialog.showModal();
  });
  return asking;
}

// The response to a request that succeeded; everything else is thrown in words.
export async function request(method, path, { json, form, signal } = {}) {
  const key = recall(sessionStorage, KEY);
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  if (json) headers["content-type"] = "application/json";
  const body = json ? JSON.stringify(json) : form;
  const response = await fetch(path, { method, headers, body, signal, cache: "no-store" }).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "The server does not answer. Is it still running?" });
  });
  if (response.ok) return response;
  const said = await response.json().then((body) => body.error, () => undefined);
  const error = new ApiError(response.status, said);
  // Another request may have brought a key meanwhile.
  const changed = recall(sessionStorage, KEY) !== key;
  const may = method !== "GET" || !declined;
  if (response.status === 401 && (changed || (may && (await askForKey(error.message))))) {
    return request(method, path, { json, form, signal });
  }
  throw error;
}

export const get = async (path) => (await request("GET", path)).json();
export const post = async (path, options) => (await request("POST", path, options)).json();
export const remove = async (path) => (await request("DELETE", path)).json();

// The things of a list, page by page, until `enough` says so of one of them.
export async function list(path, enough = () => false) {
  const found = [];
  const mark = path.includes("?") ? "&" : "?";
  for (let after = ""; ; ) {
    const page = await get(`${path}${mark}limit=1000${after && `&after=${encodeURIComponent(after)}`}`);
    for (const thing of page.data) {
      if (enough(thing)) return found;
      found.push(thing);
    }
    if (!page.has_more || !page.data.length) return found;
    after = page.data.at(-1).id;
  }
}

// The chunks of a streamed answer.
export async function* stream(path, json, signal) {
  const response = await request("POST", path, { json, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new ApiError(0, { message: "The server broke off before the answer's end." });
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(500, chunk.error);
        yield chunk;
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError(0, { message: `The answer could not be read to its end: ${error.message}` });
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Saves a file of the server under this name. With a key the browser can't fetch it by itself. Why the server refuses
// it, the browser wouldn't tell.
export async function download(path, name) {
  const link = document.createElement("a");
  link.download = name;
  const response = await request("GET", path);
  if (!recall(sessionStorage, KEY)) {
    await response.body.cancel();
    link.href = path;
    link.click();
    return;
  }
  link.href = URL.createObjectURL(await response.blob());
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
