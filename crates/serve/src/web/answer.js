// What the pages for chat and comparison share: an answer that is being written, the settings it is asked for with,
// and the box for what one says.

import { stream } from "./api.js";
import { copyButton, count, field, h, keep, problemLine, recall, several } from "./dom.js";
import { showText } from "./text.js";

// An answer: how it is asked for, shown while it is written, and what can be done with it afterwards.
export class Answer {
  constructor({ model, content = "", reasoning = "", note = "", error = "" }) {
    Object.assign(this, { model, content, reasoning, note, tokens: [], controller: null, painting: false });
    this.text = h("div.text");
    this.thoughts = h("div.text.quiet");
    this.folded = h("details.reasoning", h("summary", "Reasoning"), this.thoughts);
    this.problem = problemLine();
    this.problem.textContent = error;
    this.told = h("span.quiet");
    this.copy = copyButton(() => this.content);
    this.foot = h("footer.row", this.copy, this.told);
    const who = h("h2.who", model);
    this.element = h("article.answer", who, this.folded, this.text, this.problem, this.foot);
    this.paint();
  }

  get running() {
    return this.controller !== null;
  }

  stop() {
    this.controller?.abort();
  }

  // What is kept of it.
  get saved() {
    const { model, content, reasoning, note, problem } = this;
    return { model, content, reasoning, note, error: problem.textContent };
  }

  // Writes the answer to these messages; never fails, for it tells what went wrong itself.
  async write(settings, messages) {
    this.controller = new AbortController();
    this.element.setAttribute("aria-busy", "true");
    this.paint();
    const json = { ...settings, model: this.model, messages, stream: true, stream_options: { include_usage: true } };
    let first = 0;
    let written = 0;
    let end = "";
    try {
      for await (const chunk of stream("/v1/chat/completions", json, this.controller.signal)) {
        written = chunk.usage?.completion_tokens ?? written;
        const choice = chunk.choices[0];
        if (!choice) continue;
        const { content, reasoning_content: thought, refusal } = choice.delta;
        if (content || thought) first ||= performance.now();
        this.content += content || refusal || "";
        this.reasoning += thought || "";
        this.tokens.push(...(choice.logprobs?.content ?? []));
        end = choice.finish_reason ?? end;
        this.paintSoon();
      }
      const seconds = (performance.now() - first) / 1000;
      const speed = written > 1 && seconds > 0.005 && first ? ` · ${count(Math.round((written - 1) / seconds))} tokens/s` : "";
      this.note = written ? several(written, "token") + speed : "";
      if (end === "length") this.note += " · as long as it may be";
      if (!this.content && !this.reasoning) this.note = "Nothing was written.";
    } catch (error) {
      if (error.name === "AbortError") this.note = "Stopped.";
      else this.problem.textContent = error.message;
    }
    this.controller = null;
    this.element.setAttribute("aria-busy", "false");
    this.paint();
  }

  paintSoon() {
    if (this.painting) return;
    this.painting = true;
    requestAnimationFrame(() => {
      this.painting = false;
      this.paint();
    });
  }

  paint() {
    const page = document.documentElement;
    const follows = this.element.isConnected && page.scrollHeight - innerHeight - scrollY < 120;
    if (this.tokens.length) showTokens(this.text, this.tokens);
    else showText(this.text, this.content);
    showText(this.thoughts, this.reasoning);
    this.folded.hidden = !this.reasoning;
    this.folded.firstChild.textContent = this.running && !this.content ? "Thinking …" : "Reasoning";
    this.element.classList.toggle("writing", this.running);
    this.told.textContent = this.note;
    this.copy.hidden = !this.content;
    this.foot.hidden = this.running;
    if (follows) scrollTo(0, page.scrollHeight);
  }
}

// Tokens marked by how sure the model was of each; the one pointed at tells what else might have stood there.
function showTokens(container, tokens) {
  if (!container.told) {
    container.told = h("p.odds", { "aria-live": "polite" }, "Point at a token, or go through them with the arrow keys.");
    container.line = h("p.tokens", { tabindex: 0, role: "group", "aria-label": "Tokens and their probabilities" });
    container.replaceChildren(container.line, container.told);
    const tell = (element) => {
      container.line.querySelector(".chosen")?.classList.remove("chosen");
      element.classList.add("chosen");
      container.told.textContent = element.odds;
    };
    container.line.addEventListener("pointerover", ({ target }) => target.odds && tell(target));
    container.line.addEventListener("keydown", (event) => {
      const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
      if (!step) return;
      event.preventDefault();
      const from = container.line.querySelector(".chosen");
      const to = from ? from[step] : container.line.firstElementChild;
      if (to) tell(to);
    });
  }
  const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
  const named = ({ token, logprob }) => `${JSON.stringify(token)} ${percent(logprob)}`;
  for (const token of tokens.slice(container.line.children.length)) {
    const element = h("span", token.token);
    element.style.setProperty("--doubt", `${Math.round(60 * (1 - Math.exp(token.logprob)))}%`);
    const others = (token.top_logprobs ?? []).filter((other) => other.token !== token.token);
    element.odds = [token, ...others].map(named).join(" · ");
    container.line.append(element);
  }
}

// What answers are asked for with; what is left empty is the server's own default.
export class Settings {
  constructor(name, choices) {
    this.name = name;
    const saved = recall(localStorage, name, {});
    const input = (key, label, attributes) =>
      field(label, h("input", { type: "number", name: key, value: saved[key] ?? "", placeholder: "default", ...attributes }));
    const system = h("textarea", { name: "system", rows: 3, placeholder: "none", value: saved.system ?? "" });
    const sure = h("input", { type: "checkbox", name: "logprobs", checked: saved.logprobs ?? false });
    this.form = h(
      "form.fields",
      { oninput: () => this.save(), onsubmit: (event) => event.preventDefault() },
      choices.map(([label, choice]) => field(label, choice.element)),
      field("System prompt", system),
      h(
        "div.pair",
        input("temperature", "Temperature", { min: 0, max: 2, step: 0.1 }),
        input("max_tokens", "Max tokens", { min: 1, step: 1 }),
        input("top_p", "Top p", { min: 0, max: 1, step: 0.05 }),
        input("seed", "Seed", { step: 1 }),
      ),
      h("label.check", sure, " Show how sure of each token the model was"),
    );
    // Folded, it still says which models are talked to.
    const chosen = h("span.quiet");
    this.element = h("details.settings.card", h("summary", "Settings ", chosen), this.form);
    const tell = () => {
      chosen.textContent = this.element.open ? "" : choices.map(([, choice]) => choice.value).join(" · ");
    };
    this.element.addEventListener("toggle", tell);
    for (const [, choice] of choices) choice.onchange = tell;
    tell();
    const wide = matchMedia("(min-width: 60rem)");
    const follow = () => (this.element.open = wide.matches);
    wide.addEventListener("change", follow);
    follow();
  }

  save() {
    const { system, temperature, max_tokens, top_p, seed, logprobs } = this.form.elements;
    const saved = { system, temperature, max_tokens, top_p, seed };
    for (const key in saved) saved[key] = saved[key].value;
    keep(localStorage, this.name, { ...saved, logprobs: logprobs.checked });
  }

  // The fields of a request.
  get fields() {
    const fields = {};
    for (const input of this.form.querySelectorAll("input[type=number]")) {
      if (input.value !== "") fields[input.name] = Number(input.value);
    }
    return this.form.elements.logprobs.checked ? { ...fields, logprobs: true, top_logprobs: 5 } : fields;
  }

  // What stands before the conversation.
  get opening() {
    const content = this.form.elements.system.value.trim();
    return content ? [{ role: "system", content }] : [];
  }
}

// The box for what one says: Enter sends, Shift+Enter begins a line; while answers are written its button stops them.
export class Composer {
  constructor(label, { send, stop }) {
    this.stop = stop;
    this.busy = false;
    this.box = h("textarea", { rows: 1, placeholder: label, "aria-label": label, oninput: () => this.fit() });
    this.button = h("button.main", "Send");
    this.status = h("p.hidden", { role: "status" });
    const submit = (event) => {
      event.preventDefault();
      const text = this.box.value.trim();
      if (this.busy) stop();
      else if (text) {
        this.box.value = "";
        this.fit();
        send(text);
      }
    };
    this.element = h("form.composer", { onsubmit: submit }, this.box, this.button, this.status);
    this.box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.busy) this.element.requestSubmit();
    });
  }

  // On a phone this would bring up the keyboard.
  focus() {
    if (matchMedia("(pointer: fine)").matches) this.box.focus({ preventScroll: true });
  }

  // Shows that answers are being written, until `work` is over.
  async during(work) {
    this.show(true);
    await work;
    this.show(false);
  }

  show(busy) {
    this.busy = busy;
    this.button.textContent = busy ? "Stop" : "Send";
    this.button.classList.toggle("stop", busy);
    this.status.textContent = busy ? "Writing. Escape stops." : "Done.";
  }

  fit() {
    this.box.style.height = "auto";
    this.box.style.height = `${this.box.scrollHeight}px`;
  }
}

export function said(text) {
  return h("div.said", h("h2.hidden", "You"), h("p", text));
}
