// OpenAI's client for Node, as it is: data, a fine-tuning job, its events, and a chat with what it made.
//
//     node_client.cjs URL TRAIN.jsonl
const assert = require("node:assert/strict");
const fs = require("node:fs");
const { setTimeout: wait } = require("node:timers/promises");
const { OpenAI, BadRequestError, NotFoundError } = require("openai");
const { VERSION } = require("openai/version");

const [url, train] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What colour is the sky?" }];

async function all(pages) {
  const found = [];
  for await (const each of pages) found.push(each);
  return found;
}

async function chat(model) {
  const request = { model, messages, max_tokens: 20, temperature: 0 };
  const answer = await client.chat.completions.create(request);
  assert.equal(answer.model, model);
  const { content } = answer.choices[0].message;
  assert.ok(content);
  const chunks = await all(await client.chat.completions.create({ ...request, stream: true }));
  assert.equal(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""), content);
  // The client's own reader of streams.
  const final = await client.chat.completions.stream(request).finalChatCompletion();
  assert.equal(final.choices[0].message.content, content);
  return content;
}

async function fineTune() {
  const file = await client.files.create({ file: fs.createReadStream(train), purpose: "fine-tune" });
  const processed = await client.files.waitForProcessing(file.id);
  assert.equal(processed.status, "processed");
  const hyperparameters = { n_epochs: 8, batch_size: 16 };
  const method = { type: "supervised", supervised: { hyperparameters } };
  const training = { model: "demo", training_file: file.id, suffix: "node", seed: 3, method };
  let job = await client.fineTuning.jobs.create(training);
  const end = Date.now() + 300_000;
  while (!["succeeded", "failed", "cancelled"].includes(job.status)) {
    assert.ok(Date.now() < end, `${job.id} is ${job.status}`);
    await wait(100);
    job = await client.fineTuning.jobs.retrieve(job.id);
  }
  assert.equal(job.status, "succeeded", JSON.stringify(job.error));
  assert.match(job.fine_tuned_model, /^ft:demo:.*node/);
  const events = await all(client.fineTuning.jobs.listEvents(job.id, { limit: 7 }));
  assert.equal(new Set(events.map((event) => event.id)).size, events.length);
  assert.ok(events.length > 7 && events.some((event) => event.type === "metrics"));
  const [checkpoint] = await all(client.fineTuning.jobs.checkpoints.list(job.id));
  assert.equal(checkpoint.fine_tuning_job_id, job.id);
  const table = await (await client.files.content(job.result_files[0])).text();
  assert.ok(table.startsWith("step,"));
  return job.fine_tuned_model;
}

async function main() {
  const before = await chat("demo");
  const tuned = await fineTune();
  assert.ok((await all(client.models.list())).some((model) => model.id === tuned));
  const after = await chat(tuned);
  assert.ok(after !== before && after.includes("blue"), after);
  const { data } = await client.embeddings.create({ model: "demo", input: ["The sky", "The sea"] });
  assert.equal(data[0].embedding.length, data[1].embedding.length);
  const unknown = client.chat.completions.create({ model: "demo", messages, frog: 1 });
  await assert.rejects(unknown, (error) => error instanceof BadRequestError && /frog/.test(error.message));
  const nothing = client.chat.completions.create({ model: "nothing", messages });
  await assert.rejects(nothing, (error) => error instanceof NotFoundError && error.code === "model_not_found");
  console.log(`openai ${VERSION} for Node: everything passed`);
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
