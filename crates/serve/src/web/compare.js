// Two models beside each other: one prompt goes to both, and both write at once.

import { Answer, Composer, Settings, said } from "./answer.js";
import { h } from "./dom.js";
import { ModelChoice, isBase, refreshModels } from "./models.js";

export class Compare {
  title = "Compare";

  constructor() {
    this.choices = ["left", "right"].map((side) => new ModelChoice(`metal-candle.compare.${side}`));
    const [left, right] = this.choices;
    this.settings = new Settings("metal-candle.compare.settings", [["Model A", left], ["Model B", right]]);
    this.composer = new Composer("Ask both", { send: (text) => this.send(text), stop: () => this.stop() });
    this.log = h("div.log", { role: "log", "aria-label": "Prompts and both answers" });
    this.fresh = h("button", { type: "button", onclick: () => this.clear() }, "Start over");
    this.settings.form.append(this.fresh);
    const talk = h("div.talk.wide", this.log, this.composer.element);
    this.element = h("div.beside", h("h1.hidden", "Compare"), this.settings.element, talk);
    this.clear();
  }

  async enter(query) {
    const models = await refreshModels().catch(() => []);
    const names = [query.get("a"), query.get("b")];
    this.choices.forEach((choice, index) => names[index] && choice.choose(names[index]));
    const [left, right] = this.choices;
    // On a first visit there is something to compare, if there is anything.
    const other = models.find((model) => !isBase(model));
    if (left.value === right.value && !right.wanted && other) right.choose(other.id);
    this.composer.focus();
  }

  stop() {
    this.turns.at(-1)?.answers.forEach((answer) => answer.stop());
  }

  clear() {
    if (this.turns) this.stop();
    this.turns = [];
    this.fresh.disabled = true;
    this.log.replaceChildren(
      h(
        "div.empty",
        h("p.lead", "One prompt, two answers"),
        h("p.quiet", "Choose two models, such as a base and what you made of it, and ask both the same."),
      ),
    );
  }

  async send(text) {
    if (!this.turns.length) this.log.replaceChildren();
    this.fresh.disabled = false;
    const answers = this.choices.map((choice) => new Answer({ model: choice.value }));
    answers.forEach((answer, index) => answer.element.classList.add("ab"[index]));
    this.log.append(h("section.turn", said(text), h("div.sides", answers.map((answer) => answer.element))));
    scrollTo(0, document.documentElement.scrollHeight);
    // Each model goes on from its own answers.
    const writing = answers.map((answer, side) => {
      const messages = [...this.settings.opening];
      for (const turn of this.turns) {
        const content = turn.answers[side].content;
        if (content) messages.push({ role: "user", content: turn.text }, { role: "assistant", content });
      }
      messages.push({ role: "user", content: text });
      return answer.write(this.settings.fields, messages);
    });
    this.turns.push({ text, answers });
    await this.composer.during(Promise.all(writing));
  }
}
