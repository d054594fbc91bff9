"""The official `openai` client, as it is, against a server over the demo's model: texts, files, a fine-tuning job with
all that belongs to it, and a chat with what it made."""

import base64
import csv
import io
import json
import math
import struct
import sys
import time
import urllib.request

import openai

from server import DEMO, Server

TRAIN = DEMO / "instructions/train.jsonl"
VALID = DEMO / "instructions/valid.jsonl"
QUESTION = [{"role": "user", "content": "What colour is the sky?"}]


def client_of(server, key="none", strict=True):
    return openai.OpenAI(
        base_url=server.url + "/v1", api_key=key, _strict_response_validation=strict, max_retries=0
    )


def refused(kind, call, *words, param=None):
    try:
        call()
    except kind as error:
        assert set(error.body) == {"message", "type", "param", "code"}, error.body
        for word in words:
            assert word in error.body["message"], (word, error.body)
        assert param is None or error.body["param"] == param, error.body
        return error
    raise AssertionError(f"expected {kind.__name__} ({words})")


def chat(client):
    answer = client.chat.completions.create(model="demo", messages=QUESTION, max_tokens=8, seed=1)
    assert answer.object == "chat.completion" and answer.model == "demo"
    (choice,) = answer.choices
    assert choice.finish_reason in ("stop", "length") and choice.message.role == "assistant"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    again = client.chat.completions.create(model="demo", messages=QUESTION, max_tokens=8, seed=1)
    assert again.choices[0].message.content == choice.message.content, "the same seed"

    stream = client.chat.completions.create(
        model="demo", messages=QUESTION, max_tokens=8, seed=1, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == choice.message.content, (text, choice.message.content)
    assert chunks[-1].choices == [] and chunks[-1].usage == answer.usage or chunks[-1].usage.total_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == choice.finish_reason

    many = client.chat.completions.create(
        model="demo", messages=QUESTION, n=3, temperature=1.5, max_tokens=6, logprobs=True, top_logprobs=4
    )
    assert [c.index for c in many.choices] == [0, 1, 2]
    for choice in many.choices:
        for token in choice.logprobs.content:
            assert token.logprob <= 0 and len(token.top_logprobs) == 4
            values = [top.logprob for top in token.top_logprobs]
            assert values == sorted(values, reverse=True)

    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": ["small", "large"]}},
        "required": ["name", "size"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}
    for seed in range(5):
        answer = client.chat.completions.create(
            model="demo", messages=QUESTION, response_format=form, temperature=1, seed=seed, max_tokens=200
        )
        thing = json.loads(answer.choices[0].message.content)
        assert set(thing) == {"name", "size"} and thing["size"] in ("small", "large"), thing

    refused(openai.NotFoundError, lambda: client.chat.completions.create(model="x", messages=QUESTION), "x")
    for param, value in [("temperature", 3), ("top_p", 0), ("n", 0), ("max_tokens", 0), ("stop", [1])]:
        refused(
            openai.BadRequestError,
            lambda: client.chat.completions.create(model="demo", messages=QUESTION, extra_body={param: value}),
            param,
        )
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    refused(openai.BadRequestError, lambda: client.chat.completions.create(model="demo", messages=image), "image")
    refused(
        openai.BadRequestError,
        lambda: client.chat.completions.create(model="demo", messages=QUESTION, extra_body={"frog": 1}),
        "frog",
    )


def completions(client):
    """With `echo` the first token has no log-probability, which OpenAI's API says by a null that the client's types lack."""
    answer = client.completions.create(
        model="demo", prompt="The sky is", max_tokens=3, echo=True, logprobs=2, temperature=0
    )
    (choice,) = answer.choices
    assert choice.text.startswith("The sky is")
    probabilities = choice.logprobs
    assert probabilities.token_logprobs[0] is None and len(probabilities.tokens) == len(probabilities.top_logprobs)
    assert all(value <= 0 for value in probabilities.token_logprobs[1:])
    assert probabilities.text_offset[0] == 0
    # Tokens in, as lm-evaluation-harness sends them: the same figures, in a batch.
    tokens = post(client, "/tokenize", {"prompt": "The sky is", "add_special_tokens": False})["tokens"]
    batch = client.completions.create(
        model="demo", prompt=[tokens, tokens[:2]], max_tokens=1, echo=True, logprobs=1, temperature=0, seed=7
    )
    of_first = batch.choices[0].logprobs.token_logprobs[1 : len(tokens)]
    assert all(
        math.isclose(a, b, abs_tol=1e-4) for a, b in zip(of_first, probabilities.token_logprobs[1 : len(tokens)])
    )
    for value, top in zip(of_first, batch.choices[0].logprobs.top_logprobs[1:]):
        assert max(top.values()) >= value - 1e-6
    streamed = client.completions.create(model="demo", prompt="The sky is", max_tokens=3, temperature=0, stream=True)
    text = "".join(chunk.choices[0].text for chunk in streamed if chunk.choices)
    assert "The sky is" + text == choice.text, (text, choice.text)
    refused(openai.BadRequestError, lambda: client.completions.create(model="demo", prompt="a", suffix="b"), "suffix")


def post(client, path, body):
    base = str(client.base_url).removesuffix("/v1/")
    request = urllib.request.Request(base + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def others(client, lax):
    """The client's types know embeddings as lists alone, and it asks for base64 by itself."""
    models = [model.id for model in client.models.list()]
    assert models[0] == "demo", models
    assert client.models.retrieve("demo").id == "demo"
    refused(openai.NotFoundError, lambda: client.models.retrieve("nothing"), "nothing")
    floats = client.embeddings.create(model="demo", input=["The sky", "The sea"], encoding_format="float")
    packed = lax.embeddings.create(model="demo", input=["The sky", "The sea"])
    for a, b in zip(floats.data, packed.data):
        assert len(a.embedding) == len(b.embedding) and abs(sum(x * x for x in a.embedding) - 1) < 1e-4
        assert all(abs(x - y) < 1e-6 for x, y in zip(a.embedding, b.embedding))
    raw = lax.embeddings.with_raw_response.create(model="demo", input="The sky", encoding_format="base64")
    coded = json.loads(raw.text)["data"][0]["embedding"]
    assert len(struct.unpack(f"<{len(base64.b64decode(coded)) // 4}f", base64.b64decode(coded)))


def files(client):
    file = client.files.create(file=TRAIN.open("rb"), purpose="fine-tune")
    assert client.files.wait_for_processing(file.id).status == "processed"
    assert file.bytes == TRAIN.stat().st_size and file.filename == TRAIN.name
    assert client.files.content(file.id).read() == TRAIN.read_bytes()
    assert [f.id for f in client.files.list(limit=1)] == [file.id]
    gone = client.files.create(file=("x.jsonl", b"{}\n"), purpose="fine-tune")
    assert len(list(client.files.list(limit=1, purpose="fine-tune"))) == 2
    assert client.files.delete(gone.id).deleted
    refused(openai.NotFoundError, lambda: client.files.retrieve(gone.id), gone.id)
    refused(openai.NotFoundError, lambda: client.files.retrieve("../../etc/passwd"))
    refused(openai.BadRequestError, lambda: client.files.create(file=("x", b"x"), purpose="vision"), "purpose")
    return file


def wait(client, job, *statuses, seconds=300):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = client.fine_tuning.jobs.retrieve(job.id)
        if found.status in statuses:
            return found
        assert found.status != "failed", found.error
        time.sleep(0.1)
    raise AssertionError(f"{job.id} is {found.status}, not {statuses}")


def job(client, file):
    valid = client.files.create(file=VALID.open("rb"), purpose="fine-tune")
    method = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1, "batch_size": 16}}}
    made = client.fine_tuning.jobs.create(
        model="demo",
        training_file=file.id,
        validation_file=valid.id,
        suffix="colours",
        seed=3,
        metadata={"who": "a test"},
        method=method,
    )
    assert made.status in ("validating_files", "queued") and made.object == "fine_tuning.job"
    running = wait(client, made, "running", "succeeded")
    done = wait(client, running, "succeeded")
    assert done.fine_tuned_model.startswith("ft:demo:") and "colours" in done.fine_tuned_model
    assert done.trained_tokens > 0 and done.finished_at >= done.created_at and done.metadata == {"who": "a test"}
    assert done.hyperparameters.n_epochs == 1

    events = list(client.fine_tuning.jobs.list_events(made.id, limit=7))
    losses = [e.data["train_loss"] for e in events if e.type == "metrics" and e.data["train_loss"] is not None]
    assert len(losses) > 9 and sum(losses[:5]) < sum(losses[-5:]), ("newest first, and falling", losses)
    assert len({event.id for event in events}) == len(events)
    assert "completed" in events[0].message, events[0]
    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(made.id, limit=2))
    assert checkpoints and all(c.fine_tuning_job_id == made.id for c in checkpoints)
    table = list(csv.DictReader(io.StringIO(client.files.content(done.result_files[0]).text)))
    assert table and "train_loss" in table[0], table[:1]
    assert made.id in [j.id for j in client.fine_tuning.jobs.list(limit=1)]
    refused(openai.BadRequestError, lambda: client.fine_tuning.jobs.cancel(made.id), "succeeded")

    names = [model.id for model in client.models.list()]
    assert done.fine_tuned_model in names and checkpoints[0].fine_tuned_model_checkpoint in names
    for name in (done.fine_tuned_model, checkpoints[0].fine_tuned_model_checkpoint):
        answer = client.chat.completions.create(model=name, messages=QUESTION, max_tokens=20, temperature=0)
        assert answer.model == name and answer.choices[0].message.content
    stream = client.chat.completions.create(
        model=done.fine_tuned_model, messages=QUESTION, max_tokens=20, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    return done


def pause_and_cancel(client, file):
    method = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 20, "batch_size": 4}}}
    create = lambda: client.fine_tuning.jobs.create(model="demo", training_file=file.id, method=method, seed=1)
    first, second = create(), create()
    wait(client, first, "running")
    client.fine_tuning.jobs.pause(first.id)
    # The client's types have no word for it: to them it waits.
    wait(client, first, "queued")
    wait(client, second, "running")
    client.fine_tuning.jobs.cancel(second.id)
    assert wait(client, second, "cancelled").fine_tuned_model is None
    client.fine_tuning.jobs.resume(first.id)
    wait(client, first, "running")
    client.fine_tuning.jobs.cancel(first.id)
    wait(client, first, "cancelled")


def bad_files(client):
    bad = client.files.create(file=("bad.jsonl", b'{"messages": []}\nnot json\n'), purpose="fine-tune")
    made = client.fine_tuning.jobs.create(model="demo", training_file=bad.id)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = client.fine_tuning.jobs.retrieve(made.id)
        if found.status == "failed":
            assert "line 1" in found.error.message or ":1" in found.error.message, found.error
            assert found.error.param == "training_file", found.error
            break
        time.sleep(0.1)
    else:
        raise AssertionError(found)
    refused(
        openai.BadRequestError,
        lambda: client.fine_tuning.jobs.create(model="demo", training_file="file-nothing"),
        "training_file",
    )
    reinforcement = {"type": "reinforcement", "reinforcement": {"grader": {}}}
    refused(
        openai.BadRequestError,
        lambda: client.fine_tuning.jobs.create(
            model="demo", training_file=bad.id, extra_body={"method": reinforcement}
        ),
        "reinforcement",
    )


def keys():
    key = "a key of at least sixteen letters"
    with Server("--api-key", key) as server:
        refused(openai.AuthenticationError, lambda: client_of(server).models.list())
        assert [model.id for model in client_of(server, key).models.list()] == ["demo"]


def main():
    with Server() as server:
        client = client_of(server)
        chat(client)
        lax = client_of(server, strict=False)
        completions(lax)
        others(client, lax)
        file = files(client)
        job(client, file)
        pause_and_cancel(client, file)
        bad_files(client)
        assert server.stop() == 0
    keys()
    print(f"openai {openai.__version__}: everything passed")


if __name__ == "__main__":
    sys.exit(main())
