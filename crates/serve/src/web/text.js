// A model's text as paragraphs, lists and code. It is a small part of Markdown, made of text nodes only; what isn't
// known of it stays as it was written.

import { copyButton, h } from "./dom.js";

const FENCE = /^\s*(```+|~~~+)\s*([\w+#.-]*)/;
const ITEM = /^\s*(?:[-*+]|(\d{1,9})[.)])\s+(.*)/;
const HEADING = /^#{1,6}\s+(.*)/;
const INLINE = /(`[^`\n]+`|\*\*[^*\n]+\*\*|\*[^*\s][^*\n]*\*)/;

// Shows `text` in `container`; blocks that are there already stay, so a text that grows isn't made again.
export function showText(container, text) {
  const wanted = blocks(text);
  wanted.forEach((block, index) => {
    const key = JSON.stringify(block);
    const present = container.children[index];
    if (present?.key === key) return;
    const element = Object.assign(made(block), { key });
    if (present) present.replaceWith(element);
    else container.append(element);
  });
  while (container.children.length > wanted.length) container.lastChild.remove();
}

function blocks(text) {
  const found = [];
  let open = null;
  let fence = null;
  const begin = (block) => found.push((open = block));
  for (const line of text.split("\n")) {
    const [, mark, language] = FENCE.exec(line) ?? [];
    if (fence) {
      if (mark?.startsWith(fence) && !language) fence = open = null;
      else open.lines.push(line);
      continue;
    }
    if (mark) {
      fence = mark;
      begin({ kind: "code", language, lines: [] });
      continue;
    }
    const heading = HEADING.exec(line);
    const item = ITEM.exec(line);
    if (heading) {
      begin({ kind: "heading", lines: [heading[1]] });
      open = null;
    } else if (item) {
      const kind = item[1] ? "ol" : "ul";
      if (open?.kind !== kind) begin({ kind, start: item[1], lines: [] });
      open.lines.push(item[2]);
    } else if (!line.trim()) {
      open = open?.kind === "paragraph" ? null : open;
    } else if (open && /^\s+/.test(line) && open.kind !== "paragraph") {
      open.lines.push(`${open.lines.pop()}\n${line.trim()}`);
    } else {
      if (open?.kind !== "paragraph") begin({ kind: "paragraph", lines: [] });
      open.lines.push(line);
    }
  }
  return found;
}

function made({ kind, language, start, lines }) {
  if (kind === "code") {
    const code = lines.join("\n");
    const head = h("figcaption", h("span", language || "text"), copyButton(() => code));
    return h("figure.code", head, h("pre", { tabindex: 0 }, h("code", code)));
  }
  if (kind === "heading") return h("p.heading", inline(lines[0]));
  if (kind === "paragraph") return h("p", inline(lines.join("\n")));
  return h(kind, { start }, lines.map((line) => h("li", inline(line))));
}

function inline(text) {
  return text.split(INLINE).map((part, index) => {
    if (index % 2 === 0) return part;
    if (part.startsWith("`")) return h("code", part.slice(1, -1));
    return part.startsWith("**") ? h("strong", part.slice(2, -2)) : h("em", part.slice(1, -1));
  });
}
