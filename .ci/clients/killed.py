"""A fine-tuning job whose server is killed at random moments gives the same adapter, log,
samples and table as one that isn't."""

import pathlib
import random
import sys
import tempfile
import time

import openai

from openai_client import TRAIN, VALID, client_of
from server import Server

SEED, KILLS = 11, 8


def create(client):
    files = [client.files.create(file=path.open("rb"), purpose="fine-tune") for path in (TRAIN, VALID)]
    method = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": 16}}}
    return client.fine_tuning.jobs.create(
        model="demo", training_file=files[0].id, validation_file=files[1].id, seed=SEED, method=method
    )


def status(client, job):
    return client.fine_tuning.jobs.retrieve(job.id).status


def result(client, job, data):
    done = client.fine_tuning.jobs.retrieve(job.id)
    assert done.status == "succeeded", (done.status, done.error)
    adapter = (data / "jobs" / job.id / "adapter_model.safetensors").read_bytes()
    table = client.files.content(done.result_files[0]).text
    events = list(client.fine_tuning.jobs.list_events(job.id, limit=100))
    steps = [(e.data["step"], e.data["valid_loss"] is not None) for e in events if e.type == "metrics"]
    assert len(steps) == len(set(steps)) and steps == sorted(steps, reverse=True), steps
    samples = [e.data for e in reversed(events) if e.data and "text" in e.data]
    assert samples and all(set(sample) == {"step", "prompt", "text"} for sample in samples), samples
    return adapter, table, steps, samples, done.trained_tokens


def main():
    chance = random.Random(5)
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = pathlib.Path(folder) / "whole", pathlib.Path(folder) / "killed"
        began = time.monotonic()
        with Server(data=whole) as server:
            client = client_of(server)
            job = create(client)
            while status(client, job) not in ("succeeded", "failed"):
                time.sleep(0.05)
            took = time.monotonic() - began
            expected = result(client, job, server.data)

        server = Server(data=killed).start()
        job = create(client_of(server))
        kills = 0
        while True:
            end = time.monotonic() + chance.uniform(0.02, took / 3)
            try:
                done = False
                while time.monotonic() < end and not done:
                    done = status(client_of(server), job) in ("succeeded", "failed")
                    time.sleep(0.02)
            except openai.APIConnectionError as error:
                raise AssertionError("the server has gone by itself") from error
            if done or kills == KILLS:
                break
            server.kill()
            kills += 1
            server = Server(data=killed).start()
        client = client_of(server)
        while status(client, job) not in ("succeeded", "failed"):
            time.sleep(0.05)
        found = result(client, job, server.data)
        server.stop()
    for name, a, b in zip(("adapter", "table", "steps", "samples", "tokens"), found, expected):
        assert a == b, f"the {name} differs after {kills} kills"
    print(f"{kills} kills: the same adapter, table, events and samples")


if __name__ == "__main__":
    sys.exit(main())
