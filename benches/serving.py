#!/usr/bin/env python3
"""What a server costs, and what fine-tuning beside it costs both, on a GPU.

    python3 benches/serving.py target/release/metal-candle FOLDER [0.25 0.5 0.75]

serves a model of Llama-3-8B's shape on random weights, which PyTorch makes, and asks it as a client does:

- 256 requests at once of 256 tokens in and 128 out, whole and streamed, beside the engine alone (`metal-candle bench`);
- 64 streams one after another without a pause, a fine-tuning job alone (4 x 2048 tokens a step), and both at once for
  each share of the time that is given to training: tokens written and steps taken a second, and the time between two
  tokens of a stream.

    python3 benches/serving.py target/release/metal-candle FOLDER --gpus 2

asks a server with one GPU for 256 texts at once, and one with so many for 256 texts for each of them.

Prompts share nothing. FOLDER takes 20 GB. Every figure is printed, and all of them at the end as JSON.
"""
import argparse
import http.client
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from saving import random_weights, shape

TOKENS_IN, TOKENS_OUT = 256, 128
STREAMS, SECONDS, WARM = 64, 20, 2
VOCABULARY = 128256


def make(folder):
    """The model, with a tokenizer that has a text for every token, so that every token is an event of a stream."""
    config = shape(
        folder, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, head_dim=128, tie_word_embeddings=False
    )
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    taken = set(tokenizer["model"]["vocab"].values()) | {token["id"] for token in tokenizer["added_tokens"]}
    letters = str.maketrans("0123456789", "abcdefghij")
    tokenizer["model"]["vocab"] |= {f"w{i}".translate(letters): i for i in range(VOCABULARY) if i not in taken}
    path.write_text(json.dumps(tokenizer))
    random_weights(folder, config)


class Server:
    def __init__(self, program, model, *flags):
        self.data = tempfile.TemporaryDirectory()
        command = [program, "serve", "--model", model, "--data", f"{self.data.name}/data", "--port", "0", *flags]
        began = time.monotonic()
        self.process = subprocess.Popen(
            [*map(str, command), "--device", "cuda", "--dtype", "bf16", "--served-model-name", "m"],
            stderr=subprocess.PIPE,
            text=True,
        )
        for line in self.process.stderr:
            if found := re.search(r"http://([\d.]+):(\d+)", line):
                self.place = found.groups()
                break
            print(line, end="", file=sys.stderr)
        self.started = time.monotonic() - began
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def open(self, method, path, body=None, kind="application/json"):
        connection = http.client.HTTPConnection(*self.place, timeout=300)
        connection.request(method, path, body, {"content-type": kind} if body else {})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {answer.read()[:500]}")
        return answer

    def ask(self, method, path, body=None, **options):
        return json.loads(self.open(method, path, json.dumps(body) if body else None, **options).read())

    def stop(self):
        self.process.terminate()
        self.process.wait(60)
        self.data.cleanup()


def write(server, seed, stream, times):
    """One text; the moments at which its tokens came, or the moment at which all came."""
    chance = random.Random(seed)
    prompt = [chance.randrange(3, VOCABULARY) for _ in range(TOKENS_IN)]
    body = dict(model="m", prompt=prompt, max_tokens=TOKENS_OUT, temperature=0, ignore_eos=True, stream=stream)
    answer = server.open("POST", "/v1/completions", json.dumps(body))
    if stream:
        times.append([time.monotonic() for line in answer if line.startswith(b"data: {")])
    else:
        tokens = json.loads(answer.read())["usage"]["completion_tokens"]
        times.append([time.monotonic()] * tokens)


def load(server, count, stream, seconds=None):
    """`count` texts at once, or one after the other in as many threads for some seconds."""
    began, times, salt = time.monotonic(), [], random.randrange(1 << 40)

    def work(index):
        while True:
            write(server, salt + index, stream, times)
            index += count
            if seconds is None or time.monotonic() > began + seconds:
                return

    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    start, end = (began + WARM, began + seconds) if seconds else (began, time.monotonic())
    written = sum(start < moment <= end for moments in times for moment in moments)
    found = {"tokens/s": round(written / (end - start))}
    gaps = sorted(b - a for moments in times for a, b in zip(moments, moments[1:]))
    if stream:
        found |= {f"p{q} ms": round(1e3 * gaps[int(q / 100 * (len(gaps) - 1))], 1) for q in (50, 95, 99)}
    return found


def upload(server):
    """400 examples of nearly 2048 tokens."""
    words = ["number", "legs", "the", "colour", "sky", "beetle"]
    chance = random.Random(1)
    lines = []
    for _ in range(400):
        answer = " ".join(chance.choice(words) for _ in range(1900))
        messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages}))
    fields = [('name="purpose"', "fine-tune"), ('name="file"; filename="data.jsonl"', "\n".join(lines))]
    parts = [f"--bound\r\nContent-Disposition: form-data; {name}\r\n\r\n{text}\r\n" for name, text in fields]
    body = "".join(parts) + "--bound--\r\n"
    answer = server.open("POST", "/v1/files", body.encode(), "multipart/form-data; boundary=bound")
    return json.loads(answer.read())["id"]


def steps(server, job):
    events = server.ask("GET", f"/v1/fine_tuning/jobs/{job}/events?limit=100")["data"]
    return max((event["data"]["step"] for event in events if event["type"] == "metrics"), default=0)


def begin_job(server):
    hyperparameters = dict(n_epochs=5, batch_size=4)
    method = dict(type="supervised", supervised=dict(hyperparameters=hyperparameters))
    body = dict(model="m", training_file=upload(server), method=method)
    job = server.ask("POST", "/v1/fine_tuning/jobs", body)["id"]
    while not steps(server, job):
        time.sleep(0.2)
    return job


def rate_of(server, job, work):
    before, began = steps(server, job), time.monotonic()
    work()
    return round((steps(server, job) - before) / (time.monotonic() - began), 3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("folder", type=Path)
    parser.add_argument("shares", nargs="*", default=["0.25", "0.5", "0.75"])
    parser.add_argument("--gpus", type=int)
    given = parser.parse_args()
    program, model = given.program, given.folder / "8b"
    make(model)
    found = {}

    def tell(name, value):
        found[name] = value
        print(f"{name}: {value}", flush=True)

    if given.gpus:
        for count in (1, given.gpus):
            server = Server(program, model, "--gpus", count)
            tell(f"start with {count} GPUs, s", round(server.started, 1))
            load(server, 256 * count, False)
            for _ in range(3):
                tell(f"{256 * count} requests of {count} GPUs", load(server, 256 * count, False))
            server.stop()
        return
    bench = f"bench --only serve --shape llama-3-8b --requests 256 --prompt {TOKENS_IN} --tokens {TOKENS_OUT} --device cuda"
    output = subprocess.run([program, *bench.split(), "--dtype", "bf16", "--json"], check=True, stdout=subprocess.PIPE)
    tell("engine alone, tokens/s", round(json.loads(output.stdout)["rows"][0]["tokens_per_second"]))
    server = Server(program, model)
    tell("start, s", round(server.started, 1))
    load(server, 256, False)
    for _ in range(2):
        tell("256 requests", load(server, 256, False))
        tell("256 streams", load(server, 256, True))
    tell("64 streams, no job", load(server, STREAMS, True, SECONDS))
    job = begin_job(server)
    tell("job alone, steps/s", rate_of(server, job, lambda: time.sleep(10)))
    server.stop()
    for share in given.shares:
        server = Server(program, model, "--training-share", share)
        load(server, STREAMS, False)
        job = begin_job(server)
        beside = {}
        rate = rate_of(server, job, lambda: beside.update(load(server, STREAMS, True, SECONDS)))
        tell(f"64 streams, a job with a share of {share}", beside | {"steps/s": rate})
        server.stop()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
