// Fine-tuning: data and what they look like to the model, the start of a job, and all jobs.

import { ApiError, list, post, remove } from "./api.js";
import { Watching, attempt, count, field, h, problemLine, several, size, sureButton, time, update } from "./dom.js";
import { jobLink } from "./job.js";
import { ModelChoice, isBase, isTuned } from "./models.js";

// Problems of a file that are shown.
const SHOWN = 20;

export class Tune extends Watching {
  title = "Fine-tune";

  constructor() {
    super(3000);
    this.files = [];
    this.rows = new Map();
    // A job goes on from the base or from what another job made.
    const only = (model) => isBase(model) || isTuned(model);
    this.choice = new ModelChoice("metal-candle.tune.model", { only, onchange: () => this.recheck() });
    this.element = h(
      "div.page",
      h("h1", "Fine-tune"),
      h("div.columns.tune", h("div", this.data(), this.start()), this.all()),
    );
  }

  async look() {
    await attempt(this.listProblem, async () => {
      this.files = await list("/v1/files?purpose=fine-tune");
      const jobs = await list("/v1/fine_tuning/jobs");
      this.showFiles();
      const empty = h("p.quiet", "None yet. Give some data, choose a model and start one: it runs here, beside the chats.");
      this.jobs.parentElement.classList.toggle("some", jobs.length > 0);
      const shown = jobs.map(({ id, status, paused, fine_tuned_model }) => [id, status, paused, fine_tuned_model]);
      update(this.jobs, shown, () => (jobs.length ? h("ul.jobs", jobs.map(jobLink)) : empty));
    });
  }

  // Data.

  data() {
    this.dataProblem = problemLine();
    this.fileList = h("ul.files");
    const input = h("input.hidden", {
      type: "file",
      multiple: true,
      accept: ".jsonl,.json,.txt,application/jsonl",
      onchange: () => {
        this.upload([...input.files]);
        input.value = "";
      },
    });
    const over = (on) => (event) => {
      event.preventDefault();
      drop.classList.toggle("over", on);
    };
    const drop = h(
      "label.drop",
      {
        ondragover: over(true),
        ondragleave: over(false),
        ondrop: (event) => {
          over(false)(event);
          this.upload([...event.dataTransfer.files]);
        },
      },
      input,
      h("span", h("strong", "Choose files"), " or drop them here"),
      h("small.quiet", "JSON lines, each a conversation: ", h("code", '{"messages": […]}')),
    );
    this.sending = h("p.quiet.sending", { role: "status" });
    return h("section.card", h("h2", "Data"), drop, this.sending, this.dataProblem, this.fileList);
  }

  async upload(files) {
    for (const file of files) {
      this.sending.textContent = `Sending ${file.name} …`;
      await attempt(this.dataProblem, async () => {
        const form = new FormData();
        form.append("purpose", "fine-tune");
        form.append("file", file);
        const { id } = await post("/v1/files", { form });
        await this.look();
        const role = /valid|eval|test/i.test(file.name) ? "validation_file" : "training_file";
        this.form.elements[role].value = id;
        await this.rows.get(id)?.check();
      });
    }
    this.sending.textContent = "";
  }

  showFiles() {
    const known = this.files.map(({ id, filename }) => [id, filename]);
    // Rows that are there stay, with what was found and whether they are open.
    this.rows = new Map(this.files.map((file) => [file.id, this.rows.get(file.id) ?? this.fileRow(file)]));
    update(this.fileList, known, () => [...this.rows.values()].map((row) => h("li", row)));
    for (const [name, none] of [["training_file", "Choose a file"], ["validation_file", "None"]]) {
      const select = this.form.elements[name];
      const chosen = select.value;
      update(select, known, () => {
        const options = this.files.map(({ id, filename, created_at }) =>
          h("option", { value: id }, `${filename} · ${time(created_at).textContent}`));
        return [h("option", { value: "" }, none), options];
      });
      select.value = known.some(([id]) => id === chosen) ? chosen : "";
    }
  }

  // Another model or method reads data in another way.
  recheck() {
    for (const row of this.rows.values()) {
      if (row.open) row.check();
      else row.model = null;
    }
  }

  // A file that is opened for the first time is checked; one is open at a time.
  fileRow({ id, filename, bytes, created_at }) {
    const region = h("div.report");
    const verdict = h("span.verdict");
    const about = h("span.quiet", size(bytes), " · ", time(created_at));
    const again = h("button.plain", { type: "button", onclick: () => row.check() }, "Check again");
    const gone = sureButton("Delete", "Really delete it?", (button) =>
      attempt(this.dataProblem, async () => {
        await remove(`/v1/files/${encodeURIComponent(id)}`);
        await this.look();
      }, button));
    const row = h(
      "details",
      { name: "files", ontoggle: () => row.open && !row.model && row.check() },
      h("summary", h("strong.grow", filename), verdict, about),
      region,
      h("div.row.end", again, gone),
    );
    // What the server finds in it, and how the chosen model would read it.
    row.check = async () => {
      const problem = problemLine();
      region.replaceChildren(h("p.quiet", "Reading it …"), problem);
      row.model = this.choice.value;
      const query = new URLSearchParams({ model: row.model, method: this.form.elements.type.value });
      const path = `/v1/files/${encodeURIComponent(id)}/check?${query}`;
      const found = await attempt(problem, () => post(path), again);
      if (!found) {
        row.model = null;
        return void region.replaceChildren(problem);
      }
      region.replaceChildren(...report(found));
      const bad = found.problems.length;
      verdict.classList.toggle("bad", bad > 0);
      verdict.textContent = bad ? several(bad, "problem") : several(found.records, "example");
      if (bad || this.form.elements.training_file.value === id) row.open = true;
    };
    return row;
  }

  // The start of a job.

  start() {
    const auto = (name, label, hint, attributes = {}) =>
      field(label, h("input", { name, placeholder: "auto", inputmode: "decimal", autocomplete: "off", ...attributes }), hint);
    this.startProblem = problemLine();
    const beta = auto("beta", "Beta", "above 0, up to 2");
    beta.hidden = true;
    const method = h(
      "select",
      {
        name: "type",
        onchange: () => {
          beta.hidden = method.value !== "dpo";
          this.recheck();
        },
      },
      h("option", { value: "supervised" }, "Supervised: examples of good answers"),
      h("option", { value: "dpo" }, "DPO: the better of two answers"),
    );
    this.form = h(
      "form.fields",
      {
        novalidate: true,
        onsubmit: (event) => {
          event.preventDefault();
          this.begin(event.submitter);
        },
      },
      field("Model", this.choice.element),
      field("Method", method),
      h("div.pair", field("Training data", h("select", { name: "training_file" })), field("Validation data", h("select", { name: "validation_file" }))),
      h(
        "div.pair",
        auto("n_epochs", "Epochs", "1 to 50"),
        auto("batch_size", "Batch size", "1 to 256"),
        auto("learning_rate_multiplier", "Rate multiplier", "of the learning rate"),
        beta,
        auto("seed", "Seed", "any whole number", { inputmode: "numeric" }),
        auto("suffix", "Suffix", "a part of the result's name", { placeholder: "none", maxlength: 64, inputmode: "text" }),
      ),
      this.startProblem,
      h("div.row.end", h("button.main", "Start the job")),
    );
    return h("section.card", h("h2", "New job"), this.form);
  }

  async begin(button) {
    const { elements } = this.form;
    for (const control of elements) control.removeAttribute("aria-invalid");
    const value = (name) => elements[name].value.trim();
    const type = value("type");
    const hyperparameters = {};
    const names = ["n_epochs", "batch_size", "learning_rate_multiplier", ...(type === "dpo" ? ["beta"] : [])];
    for (const name of names) hyperparameters[name] = number(value(name)) ?? "auto";
    const json = { model: this.choice.value, training_file: value("training_file"), method: { type, [type]: { hyperparameters } } };
    if (value("validation_file")) json.validation_file = value("validation_file");
    if (value("suffix")) json.suffix = value("suffix");
    if (value("seed")) json.seed = number(value("seed"));
    this.form.lastChild.before(this.startProblem);
    const job = await attempt(this.startProblem, async () => {
      try {
        if (!json.training_file) throw new ApiError(0, { message: "Choose the training data, or give some above.", param: "training_file" });
        return await post("/v1/fine_tuning/jobs", { json });
      } catch (error) {
        if (this.blame(error.param)) error.message = error.message.replace(`${error.param}: `, "");
        throw error;
      }
    }, button);
    if (job) location.hash = `#tune/${job.id}`;
  }

  // Marks the field that the server says is wrong, and has the reason stand below it.
  blame(param) {
    const control = this.form.elements[param?.split(".").at(-1)];
    if (!control) return false;
    control.setAttribute("aria-invalid", "true");
    control.closest("label").after(this.startProblem);
    control.focus();
    return true;
  }

  all() {
    this.listProblem = problemLine();
    this.jobs = h("div");
    return h("section.card.all", h("h2", "Jobs"), this.listProblem, this.jobs);
  }
}

// What was found in a file: how much it is, what is wrong with it, and what of its first example counts.
function report({ records, tokens, trained_tokens, longest, max_tokens, truncated, nothing_learned, problems, stopped, example }) {
  const sums = [
    several(records, "example"),
    `${several(tokens, "token")}, ${count(trained_tokens)} of them learned`,
    `the longest has ${count(longest)}`,
  ];
  if (truncated) sums.push(`${count(truncated)} cut after ${several(max_tokens, "token")}`);
  if (nothing_learned) sums.push(`${count(nothing_learned)} with nothing to learn`);
  const lines = problems.slice(0, SHOWN).map(({ line, message }) => h("li", h("strong", `Line ${count(line)}`), ` ${message}`));
  const more = problems.length - lines.length;
  if (more > 0) lines.push(h("li", `and ${several(more, "more", "more")}`));
  if (stopped) lines.push(h("li", "The rest of the file was not looked at."));
  return [
    records > 0 && h("p", sums.join(" · ")),
    lines.length > 0 && h("ul.problems", lines),
    example?.length > 0 && h("p.quiet", "The first example as the model reads it. ", h("mark", "Marked"), " is what it learns to write."),
    example?.length > 0 && h("p.tokens", { tabindex: 0, role: "group", "aria-label": "The first example" }, example.map(piece)),
  ].filter(Boolean);
}

// A token; ends of lines are shown and kept.
function piece({ text, trained }) {
  return h(trained ? "mark" : "span", text.replaceAll("\n", "↵\n"));
}

const number = (text) => (text === "" ? undefined : Number.isNaN(Number(text)) ? text : Number(text));
