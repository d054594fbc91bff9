// One fine-tuning job: how it goes, what it said, and what can be done with what it made.

import { ApiError, download, get, list, post } from "./api.js";
import { Chart } from "./chart.js";
import { Watching, attempt, count, h, problemLine, span, sureButton, time, update } from "./dom.js";

const OVER = ["succeeded", "failed", "cancelled"];
const WORDS = { validating_files: "checking files" };

// OpenAI's clients know no status of its own for a job that is paused.
const statusOf = (job) => (job.paused ? "paused" : job.status);

function status(job) {
  return h(`span.status.${statusOf(job)}`, WORDS[statusOf(job)] ?? statusOf(job));
}

// What a job is called: by its result, the suffix it was given, or its id.
export function jobName(job) {
  const [, , , suffix] = job.fine_tuned_model?.split(":") ?? [];
  return suffix || job.user_provided_suffix || job.id.replace("ftjob-", "").slice(0, 8);
}

export function jobLink(job) {
  const about = h("span.quiet", job.model, " · ", time(job.created_at));
  return h("li", h("a.job", { href: `#tune/${job.id}` }, h("strong", jobName(job)), status(job), about));
}

export class Job extends Watching {
  title = "Job";

  constructor(id) {
    super(1000);
    this.id = id;
    this.path = `/v1/fine_tuning/jobs/${encodeURIComponent(id)}`;
    this.events = new Map();
    this.names = new Map();
    this.problem = problemLine();
    this.head = h("div.row");
    this.actions = h("div.row.actions");
    this.progress = h("div.progress");
    this.chart = new Chart("Loss by step", [{ name: "training", smooth: true }, { name: "validation", smooth: false }], {
      empty: "The curve begins with the first step.",
    });
    this.facts = h("dl.facts");
    this.checkpoints = h("div");
    this.samples = h("div.samples");
    this.said = h("ol.events", { tabindex: 0, "aria-label": "Events, the latest first" });
    const card = (title, ...inside) => h("section.card", h("h2", title), inside);
    this.element = h(
      "div.page",
      h("a.back", { href: "#tune" }, "← All jobs"),
      this.head,
      this.problem,
      this.actions,
      h("section.card", h("h2", "Loss"), this.progress, this.chart.element),
      h("div.columns", card("About this job", this.facts), h("div", card("Samples", this.samples), card("Checkpoints", this.checkpoints), card("Events", this.said))),
    );
  }

  async look() {
    try {
      const job = await get(this.path);
      const fresh = await list(`${this.path}/events`, (event) => this.events.has(event.id));
      for (const event of fresh.reverse()) this.events.set(event.id, event);
      const checkpoints = await list(`${this.path}/checkpoints`);
      await this.nameFiles(job);
      this.show(job, checkpoints);
      this.problem.textContent = job.error?.message ?? "";
      return !OVER.includes(job.status);
    } catch (error) {
      this.problem.textContent = error.message;
      return !(error instanceof ApiError && error.status === 404);
    }
  }

  // Files have names for people; those that are gone keep their ids.
  async nameFiles(job) {
    for (const id of [job.training_file, job.validation_file]) {
      if (!id || this.names.has(id)) continue;
      const file = await get(`/v1/files/${encodeURIComponent(id)}`).catch(() => ({ filename: `${id} (deleted)` }));
      this.names.set(id, file.filename);
    }
  }

  show(job, checkpoints) {
    const events = [...this.events.values()];
    const metrics = events.filter((event) => event.type === "metrics").map((event) => event.data);
    update(this.head, [jobName(job), statusOf(job)], () => [h("h1", jobName(job)), status(job)]);
    update(this.actions, [statusOf(job), job.fine_tuned_model, job.result_files], () => this.offer(job));
    this.showProgress(job, metrics);
    // A job that goes on after a crash tells the steps since its last checkpoint again.
    const curve = (...names) => {
      const points = new Map();
      for (const data of metrics) {
        const value = names.map((name) => data[name]).find(Number.isFinite);
        if (value !== undefined) points.set(data.step, value);
      }
      return [...points];
    };
    if (metrics.length !== this.drawn) this.chart.set([curve("train_loss"), curve("full_valid_loss", "valid_loss")]);
    this.drawn = metrics.length;
    const samples = events.map((event) => event.data).filter((data) => data?.text != null);
    update(this.samples, samples, () => (samples.length ? latest(samples) : h("p.quiet", "None yet: they come with the checkpoints.")));
    update(this.facts, [job, ...this.names], () => this.about(job));
    update(this.checkpoints, checkpoints, () => (checkpoints.length ? table(checkpoints) : h("p.quiet", "None yet.")));
    const told = events.filter((event) => event.type !== "metrics").slice(-200).reverse();
    update(this.said, told, () => told.map(said));
  }

  offer(job) {
    const act = (name) => (button) =>
      attempt(this.problem, async () => {
        await post(`${this.path}/${name}`);
        await this.look();
      }, button);
    const button = (label, work) => h("button", { type: "button", onclick: (event) => work(event.target) }, label);
    const cancel = sureButton("Cancel", "Really cancel it?", act("cancel"));
    if (statusOf(job) === "paused") return [button("Resume", act("resume")), cancel];
    if (!OVER.includes(job.status)) return [button("Pause", act("pause")), cancel];
    const saved = (path, name) => (control) => attempt(this.problem, () => download(path, name), control);
    const model = job.fine_tuned_model;
    const file = jobName(job).replace(/[^\w.-]+/g, "-");
    return [
      model && h("a.button.main", { href: chatWith(model) }, "Chat with it"),
      model && h("a.button", { href: `#compare?a=${encodeURIComponent(job.model)}&b=${encodeURIComponent(model)}` }, "Compare with the base"),
      model && button("Download the adapter", saved(`${this.path}/adapter`, `${file}.tar`)),
      model && button("Download the merged model", saved(`${this.path}/merged`, `${file}-merged.tar`)),
      (job.result_files ?? []).map((id) =>
        button("Download the figures", saved(`/v1/files/${encodeURIComponent(id)}/content`, `${file}.csv`))),
    ];
  }

  showProgress(job, metrics) {
    const { step, total_steps: total } = metrics.at(-1) ?? {};
    if (!step) return;
    const speed = metrics.findLast((data) => data.tokens_per_second)?.tokens_per_second;
    const left = job.estimated_finish - Date.now() / 1000;
    const rest = job.status !== "running" ? [] : [speed && `${count(Math.round(speed))} tokens/s`, left > 0 && `about ${span(left)} left`];
    this.bar ??= h("progress", { "aria-label": "Steps done" });
    this.steps ??= h("span.quiet");
    if (!this.bar.isConnected) this.progress.append(...(total ? [this.bar] : []), this.steps);
    Object.assign(this.bar, { max: total ?? 1, value: step });
    const done = total ? `step ${count(step)} of ${count(total)}` : `step ${count(step)}`;
    this.steps.textContent = [done, ...rest].filter(Boolean).join(" · ");
  }

  about(job) {
    const method = job.method?.type ?? "supervised";
    const { n_epochs, batch_size, learning_rate_multiplier, beta } = { ...job.hyperparameters, ...job.method?.[method]?.hyperparameters };
    const facts = [
      ["Base", job.model],
      ["Result", job.fine_tuned_model],
      ["Method", method],
      ["Training data", this.names.get(job.training_file)],
      ["Validation data", this.names.get(job.validation_file)],
      ["Epochs", n_epochs],
      ["Batch size", batch_size],
      ["Rate multiplier", learning_rate_multiplier],
      ["Beta", beta],
      ["Seed", job.seed],
      ["Trained tokens", job.trained_tokens && count(job.trained_tokens)],
      ["Started", time(job.created_at)],
      ["Took", job.finished_at && span(job.finished_at - job.created_at)],
      ["Id", job.id],
    ];
    return facts.filter(([, value]) => value != null).map(([name, value]) => h("div", h("dt", name), h("dd", value)));
  }
}

const chatWith = (model) => `#chat?model=${encodeURIComponent(model)}`;

function table(checkpoints) {
  const figure = (value) => (Number.isFinite(value) ? value.toPrecision(3) : "–");
  const row = ({ step_number, metrics, fine_tuned_model_checkpoint: model }) => {
    const valid = metrics.full_valid_loss ?? metrics.valid_loss;
    const link = h("a", { href: chatWith(model), "aria-label": `Chat with the checkpoint of step ${step_number}` }, "Chat");
    return h("tr", h("th", { scope: "row" }, count(step_number)), h("td", figure(metrics.train_loss)), h("td", figure(valid)), h("td", link));
  };
  const head = ["Step", "Training", "Validation", h("span.hidden", "Chat with it")].map((name) => h("th", { scope: "col" }, name));
  return h("table", h("thead", h("tr", head)), h("tbody", checkpoints.map(row)));
}

// What was written to each prompt after the last step, and behind it what was written before.
function latest(samples) {
  const prompts = new Map();
  for (const sample of samples) {
    if (!prompts.has(sample.prompt)) prompts.set(sample.prompt, new Map());
    // A job that goes on after a crash writes those since its last checkpoint again.
    prompts.get(sample.prompt).set(sample.step, sample);
  }
  const line = ({ step, text }) => h("p", h("span.quiet", `step ${count(step)}: `), text || "(nothing)");
  const shown = ([prompt, [newest, ...older]]) =>
    h("article.sample", h("h3", prompt), line(newest), older.length > 0 && h("details", h("summary.quiet", "Before"), older.map(line)));
  return [...prompts].map(([prompt, bySteps]) => shown([prompt, [...bySteps.values()].sort((one, other) => other.step - one.step)]));
}

// An event; that of a sample has what the model was given and what it wrote.
function said({ created_at, level, message, data }) {
  const sample = data?.text && h("blockquote", h("span.quiet", data.prompt), " ", data.text);
  return h(`li.${level}`, h("span.quiet", time(created_at)), h("span", message, sample));
}
