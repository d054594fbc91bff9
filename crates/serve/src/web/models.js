// The models that the server has, and the choice of one.

import { get } from "./api.js";
import { h, keep, recall } from "./dom.js";

export const isTuned = (model) => model.id.startsWith("ft:");
export const isBase = (model) => !model.parent && !isTuned(model);

const isCheckpoint = (model) => isTuned(model) && model.id.includes(":ckpt-step-");
const byStep = (one, other) => one.id.localeCompare(other.id, "en", { numeric: true });

const choices = new Set();
let models = [];

export async function refreshModels() {
  const { data: found } = await get("/v1/models");
  // A choice that is open is left alone while nothing is new.
  const changed = JSON.stringify(found) !== JSON.stringify(models);
  models = found;
  if (changed) for (const choice of choices) choice.fill();
  return models;
}

// A choice among the models, kept under `name` between visits. A model that isn't listed may be chosen by a link, as a
// checkpoint is.
export class ModelChoice {
  constructor(name, { only = () => true, onchange = () => {} } = {}) {
    Object.assign(this, { name, only, onchange, wanted: recall(localStorage, name, "") });
    this.element = h("select", { name: "model", onchange: () => this.choose(this.element.value) });
    choices.add(this);
    this.fill();
  }

  get value() {
    return this.element.value;
  }

  choose(id) {
    this.wanted = id;
    keep(localStorage, this.name, id);
    this.fill();
  }

  fill() {
    const known = models.filter(this.only);
    const group = (label, found) =>
      found.length > 0 && h("optgroup", { label }, found.map(({ id }) => h("option", { value: id }, id)));
    this.element.replaceChildren();
    const groups = [
      group("Base", known.filter(isBase)),
      group("Adapters", known.filter((model) => !isBase(model) && !isTuned(model))),
      group("Fine-tuned here", known.filter((model) => isTuned(model) && !isCheckpoint(model))),
      group("Their checkpoints", known.filter(isCheckpoint).sort(byStep)),
    ];
    this.element.append(...groups.filter(Boolean));
    // A link may name a checkpoint before the list is there, and models go.
    const wanted = this.wanted || known[0]?.id || "";
    const listed = known.some(({ id }) => id === wanted);
    if (wanted && !listed && (!models.length || wanted.startsWith("ft:"))) {
      this.element.append(h("option", { value: wanted }, wanted));
    }
    if (wanted) this.element.value = wanted;
    if (this.element.selectedIndex < 0) this.element.selectedIndex = 0;
    this.element.disabled = !this.element.length;
    if (this.value === this.shown) return;
    this.shown = this.value;
    this.onchange();
  }
}
