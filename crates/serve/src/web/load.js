// What the machine has to do, from the server's figures for Prometheus.

import { ApiError, get, request } from "./api.js";
import { Chart } from "./chart.js";
import { Watching, h, problemLine, update } from "./dom.js";
import { jobLink } from "./job.js";

// Seconds that are shown.
const SHOWN = 120;

export class Load extends Watching {
  title = "Load";

  constructor() {
    super(1000);
    const ago = (x) => (x >= -0.5 ? "now" : `${Math.round(-x)} s ago`);
    const chart = (label, names, options) =>
      new Chart(label, names.map((name) => ({ name })), { tellX: ago, reachY: [0, 4], reachX: [-SHOWN, 0], empty: "Waiting for figures …", ...options });
    const percent = (value) => `${Math.round(100 * value)} %`;
    this.charts = [
      chart("Requests", ["running", "waiting"]),
      chart("Tokens per second", ["written", "read"]),
      chart("Cache of keys and values in use", ["in use"], { tellY: percent, reachY: [0, 1] }),
    ];
    this.samples = [];
    this.problem = problemLine();
    this.job = h("div");
    const card = (title, ...inside) => h("section.card", h("h2", title), inside);
    this.tiles = [
      card("Requests", this.charts[0].element),
      card("Tokens per second", this.charts[1].element),
      card("Cache of keys and values", this.charts[2].element),
    ];
    this.closed = card("The machine's figures", h("p", "Your key may not see them: they are for keys with the scope admin."));
    this.element = h("div.page", h("h1", "Load"), this.problem, h("div.tiles", this.tiles, this.closed, card("Fine-tuning", this.job)));
    this.closed.hidden = true;
  }

  async look() {
    try {
      const [maySee, mayTune] = [await allowed(() => this.measure()), await allowed(() => this.showJobs())];
      for (const tile of this.tiles) tile.hidden = !maySee;
      this.closed.hidden = maySee;
      if (!mayTune) update(this.job, "closed", () => h("p", "Your key may not see jobs: they are for keys with the scope fine-tune."));
      this.problem.textContent = "";
      return maySee || mayTune;
    } catch (error) {
      this.problem.textContent = error.message;
    }
  }

  async measure() {
    const figures = read(await (await request("GET", "/metrics")).text());
    this.samples.push({ ...figures, at: performance.now() / 1000 });
    this.show();
  }

  async showJobs() {
    const { data } = await get("/v1/fine_tuning/jobs?limit=20");
    const busy = data.filter((job) => ["running", "queued", "validating_files"].includes(job.status));
    const none = () => h("p.quiet", "No job is running or waiting. ", h("a", { href: "#tune" }, "Start one"));
    update(this.job, busy, () => (busy.length ? h("ul.jobs", busy.map(jobLink)) : none()));
  }

  show() {
    const now = this.samples.at(-1).at;
    while (now - this.samples[0].at > SHOWN) this.samples.shift();
    const line = (value) => this.samples.map((sample) => [sample.at - now, value(sample)]);
    // A counter's growth; a server that started again begins at 0.
    const rate = (name) =>
      this.samples.slice(1).map((sample, index) => {
        const before = this.samples[index];
        return [sample.at - now, Math.max(0, sample[name] - before[name]) / (sample.at - before.at)];
      });
    this.charts[0].set([line((sample) => sample.running), line((sample) => sample.waiting)]);
    this.charts[1].set([rate("written"), rate("read")]);
    this.charts[2].set([line((sample) => sample.cache)]);
  }
}

// Whether the key may do this; the server has a 403 for what it may not.
async function allowed(work) {
  try {
    await work();
    return true;
  } catch (error) {
    if (error instanceof ApiError && error.status === 403) return false;
    throw error;
  }
}

// The sums over all labels of the figures that are shown, which have vLLM's names.
function read(text) {
  const sums = {};
  for (const line of text.split("\n")) {
    const [, name, value] = /^vllm:(\w+)(?:\{.*\})?\s+(\S+)/.exec(line) ?? [];
    if (name) sums[name] = (sums[name] ?? 0) + Number(value);
  }
  return {
    running: sums.num_requests_running ?? 0,
    waiting: sums.num_requests_waiting ?? 0,
    cache: sums.kv_cache_usage_perc ?? sums.gpu_cache_usage_perc ?? 0,
    written: sums.generation_tokens_total ?? 0,
    read: sums.prompt_tokens_total ?? 0,
  };
}
