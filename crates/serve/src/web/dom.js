// Elements, and how numbers and times are told. Text becomes text nodes here, so nothing that a model, a file or the
// server says is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

// `h("p.quiet", {title: "…"}, "text", node, …)`; children that are null or false are left out.
export function h(tag, ...rest) {
  const [name, ...classes] = tag.split(".");
  return fill(document.createElement(name), classes, rest);
}

export function svg(tag, ...rest) {
  const [name, ...classes] = tag.split(".");
  return fill(document.createElementNS(SVG, name), classes, rest);
}

function fill(element, classes, rest) {
  if (classes.length) element.setAttribute("class", classes.join(" "));
  const attributes = rest[0]?.constructor === Object ? rest.shift() : {};
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") element[name] = value;
    else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...rest.flat(Infinity).filter((child) => child != null && child !== false));
  return element;
}

// A line for what went wrong where it happened, empty until then.
export function problemLine() {
  return h("p.problem", { role: "alert" });
}

// Does `work` with these controls off; what goes wrong is told in `line`.
export async function attempt(line, work, ...controls) {
  line.textContent = "";
  for (const control of controls) control.disabled = true;
  try {
    return await work();
  } catch (error) {
    line.textContent = error.message;
  } finally {
    for (const control of controls) control.disabled = false;
  }
}

// Does `work` now and again `ms` after its end while the page can be seen, until it gives false or the function that
// is returned is called.
export function every(ms, work) {
  let over = false;
  const turn = async () => {
    if (!over && (document.hidden || (await work()) !== false)) setTimeout(turn, ms);
  };
  turn();
  return () => (over = true);
}

// A part of the page that looks at the server again and again while it is shown: `look` as with `every`.
export class Watching {
  constructor(ms) {
    this.ms = ms;
  }

  enter() {
    this.end ??= every(this.ms, () => this.look());
  }

  leave() {
    this.end();
    this.end = null;
  }
}

// Makes an element's children anew only if what they show has changed, so that focus and selection stay.
export function update(element, shown, make) {
  const key = JSON.stringify(shown);
  if (element.shown === key) return;
  element.shown = key;
  element.replaceChildren(...[make()].flat(Infinity).filter(Boolean));
}

// A button for what can't be undone: the first press asks, the second does it.
export function sureButton(label, question, work) {
  const button = h("button.plain", { type: "button", onclick: press, onblur: calm }, label);
  let asked = false;
  function press() {
    if (asked) work(button);
    asked = !asked;
    show();
  }
  function calm() {
    asked = false;
    show();
  }
  function show() {
    button.textContent = asked ? question : label;
    button.classList.toggle("danger", asked);
  }
  return button;
}

export function field(label, control, hint) {
  return h("label.field", h("span", label), control, hint && h("small.quiet", hint));
}

export function copyButton(text, label = "Copy") {
  const button = h("button.plain", { type: "button", onclick: copy }, label);
  async function copy() {
    const done = await copyText(text());
    button.textContent = done ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = label), 1500);
  }
  return button;
}

// The clipboard is closed to pages without TLS from another machine; the older way is open to them.
async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const box = h("textarea.hidden", { value: text });
  document.body.append(box);
  box.select();
  const done = document.execCommand("copy");
  box.remove();
  return done;
}

// What is kept between visits, or what stands for it where the browser keeps nothing.
export function recall(storage, name, otherwise) {
  try {
    return JSON.parse(storage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function keep(storage, name, value) {
  try {
    storage.setItem(name, JSON.stringify(value));
  } catch {
    // The browser keeps nothing or has no room left: the page works without.
  }
}

export const count = (number) => number.toLocaleString("en");

export function several(number, one, more = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : more}`;
}

export function size(bytes) {
  const power = bytes < 1000 ? 0 : Math.min(3, Math.floor(Math.log10(bytes) / 3));
  return `${(bytes / 1000 ** power).toFixed(power ? 1 : 0)} ${["bytes", "kB", "MB", "GB"][power]}`;
}

export function span(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

export function time(seconds) {
  const date = new Date(seconds * 1000);
  const today = date.toDateString() === new Date().toDateString();
  const shown = date.toLocaleString([], today ? { timeStyle: "short" } : { dateStyle: "medium", timeStyle: "short" });
  return h("time", { datetime: date.toISOString(), title: date.toLocaleString() }, shown);
}
