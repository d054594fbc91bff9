// One conversation with one model.

import { Answer, Composer, Settings, said } from "./answer.js";
import { h, keep, recall } from "./dom.js";
import { ModelChoice } from "./models.js";

const STORED = "metal-candle.chat";
// Characters of a conversation that are kept for when the page is loaded again.
const KEPT = 200_000;

export class Chat {
  title = "Chat";

  constructor() {
    this.choice = new ModelChoice("metal-candle.chat.model");
    this.settings = new Settings("metal-candle.chat.settings", [["Model", this.choice]]);
    this.composer = new Composer("Say something", { send: (text) => this.send(text), stop: () => this.stop() });
    this.log = h("div.log", { role: "log", "aria-label": "Conversation" });
    this.fresh = h("button", { type: "button", onclick: () => this.clear() }, "New conversation");
    this.settings.form.append(this.fresh);
    const talk = h("div.talk", this.log, this.composer.element);
    this.element = h("div.beside", h("h1.hidden", "Chat"), this.settings.element, talk);
    this.again = h("button.plain", { type: "button", onclick: () => this.regenerate() }, "Write again");
    // What was said, each a text of the person's or an `Answer`.
    this.turns = [];
    for (const turn of recall(sessionStorage, STORED, [])) this.add(turn.model ? new Answer(turn) : turn.said);
    this.arrange();
  }

  enter(query) {
    if (query.has("model")) this.choice.choose(query.get("model"));
    this.composer.focus();
  }

  stop() {
    this.turns.at(-1)?.stop?.();
  }

  clear() {
    this.stop();
    this.turns = [];
    this.log.replaceChildren();
    this.arrange();
    this.composer.focus();
  }

  add(turn) {
    this.turns.push(turn);
    this.log.append(turn.element ?? said(turn));
    return turn;
  }

  send(text) {
    if (!this.turns.length) this.log.replaceChildren();
    this.add(text);
    this.answer();
  }

  regenerate() {
    this.turns.pop().element.remove();
    this.answer();
  }

  async answer() {
    const messages = [...this.settings.opening];
    for (const turn of this.turns) {
      if (typeof turn === "string") messages.push({ role: "user", content: turn });
      else if (turn.content) messages.push({ role: "assistant", content: turn.content });
      // What was not answered is not said twice in a row, which some chat templates refuse.
      else if (messages.at(-1)?.role === "user") messages.pop();
    }
    const answer = this.add(new Answer({ model: this.choice.value }));
    scrollTo(0, document.documentElement.scrollHeight);
    await this.composer.during(answer.write(this.settings.fields, messages));
    this.arrange();
  }

  // The last answer can be written again, an empty log says what to do, and all is kept for a reload.
  arrange() {
    const last = this.turns.at(-1);
    this.again.remove();
    if (last instanceof Answer && !last.running) last.foot.children[0].after(this.again);
    if (!last) this.log.replaceChildren(welcome());
    this.fresh.disabled = !last;
    const turns = this.turns.map((turn) => turn.saved ?? { said: turn });
    while (JSON.stringify(turns).length > KEPT) turns.splice(0, 2);
    keep(sessionStorage, STORED, turns);
  }
}

function welcome() {
  return h(
    "div.empty",
    h("img", { src: "/ui/icon.svg", alt: "", width: 56, height: 56 }),
    h("p.lead", "What would you like to know?"),
    h("p.quiet", "Everything you write stays on the machine that this server runs on."),
    h("p.quiet", h("kbd", "Enter"), " sends, ", h("kbd", "Shift"), " ", h("kbd", "Enter"), " begins a new line, ", h("kbd", "Esc"), " stops."),
  );
}
